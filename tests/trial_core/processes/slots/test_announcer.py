"""What a rank announces while something takes long."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from tests.support.slots import TOY, OwnSlots, build, toy_config
from trial_core.messages import Activity
from trial_core.processes.slots import announcer
from trial_core.processes.slots.announcer import AnnouncementTimer, Announcer

COMPILING = "compiling cpu_adam"


def test_something_short_is_not_announced() -> None:
    """Nor a build that is up to date, whose lock exists for a moment."""
    timer = AnnouncementTimer("constructing the trial", now=100.0)
    assert timer.due(None, 105.0) is None
    assert timer.due(COMPILING, 106.0) is None
    assert timer.due(None, 107.0) is None
    assert timer.due(None, 116.9) is None
    assert timer.due(None, 117.0) == "constructing the trial, for 10 s"


def test_a_build_is_announced_soon_and_again() -> None:
    """With the time since it began, about every quarter of a minute."""
    timer = AnnouncementTimer("constructing the trial", now=100.0)
    announced = [(at, timer.due(COMPILING, 100.0 + at)) for at in range(1, 40)]
    assert [(at, text) for at, text in announced if text] == [
        (4, "compiling cpu_adam, for 3 s"),
        (19, "compiling cpu_adam, for 18 s"),
        (34, "compiling cpu_adam, for 33 s"),
    ]


def test_only_rank_0_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its thread ends with the block."""
    monkeypatch.setattr(announcer, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(announcer, "FIRST_SPECIAL_SECONDS", 0.0)
    sent: queue.SimpleQueue[Activity] = queue.SimpleQueue()
    with Announcer(sent.put, is_silent=False).activity("constructing", lambda: COMPILING):
        assert sent.get(timeout=20).text.startswith(COMPILING)
    with Announcer(sent.put, is_silent=True).activity("constructing", lambda: pytest.fail("asked")):
        assert "announcer" not in {thread.name for thread in threading.enumerate()}
    assert sent.empty()


@pytest.mark.slots
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_driver_learns_which_operator_is_compiled(tmp_path: Path) -> None:
    """A real build of DeepSpeed's, in an empty folder. It takes minutes."""
    texts: list[str] = []
    with OwnSlots(
        1, working_dir=TOY, log_dir=tmp_path / "logs", on_activity=texts.append,
        environment={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    ) as slots:  # fmt: skip
        build(slots, toy_config(tmp_path, entrypoint="compiling_trials:Compiling"), tmp_path)
    assert (tmp_path / "extensions" / "cpu_adam" / "cpu_adam.so").exists()
    compiling = [
        text for text in texts if text.startswith("compiling DeepSpeed's operator cpu_adam")
    ]
    assert len(compiling) >= 2
    assert compiling[0].endswith(", for 3 s"), texts
