"""Errors that end a script: shown once for all ranks, without a traceback."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tests.support.fitting import start
from trial_core.errors import ConfigError, SlotsError, TrialflowError
from trial_core.rank.script import shown

SCRIPT = """
from trial_core.deepspeed import init

with init(exp_conf={"searcher": []}):
    pass
"""
REFUSED = "error: exp_conf: searcher: expected a mapping, got a list"


class Store(HashStore):
    """The ranks' store, in one process."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two ranks with a store, which do not wait for each other."""
    store = Store()
    monkeypatch.setattr(shown, "_get_default_store", lambda: store)
    monkeypatch.setattr(shown.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(shown, "WAIT_SECONDS", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return store


def show_on(rank: int, text: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shown, "_rank_and_size", lambda: (rank, 2))
    shown.show(text)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("no max_length", "error: no max_length\n"),
        ("the disk is full", "error: no max_length\nerror on rank 1: the disk is full\n"),
    ],
)
def test_rank_0_shows_what_all_ranks_raise(
    ranks: Store, other: str, expected: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Another error of another rank is shown as well."""
    show_on(0, "no max_length", monkeypatch)
    show_on(1, other, monkeypatch)
    assert capsys.readouterr().err == expected


def test_the_error_of_one_rank_is_shown(
    ranks: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may wait in a collective, and shows nothing."""
    show_on(1, "the disk is full", monkeypatch)
    assert capsys.readouterr().err == "error on rank 1: the disk is full\n"


def test_only_errors_of_ours_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the script's own code is shown as Python does. Ours name the script's line."""
    shown_by_python: list[BaseException] = []

    def pythons(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        shown_by_python.append(error)

    monkeypatch.setattr(shown.sys, "excepthook", pythons)
    monkeypatch.setattr(shown, "_installed", [])
    shown.install()
    shown.install()  # as for a second block of a script
    for error in (KeyError("x"), ConfigError("no max_length")):
        try:
            raise error
        except (KeyError, ConfigError) as raised:
            shown.sys.excepthook(type(raised), raised, raised.__traceback__)
    assert [type(error) for error in shown_by_python] == [KeyError]
    output = capsys.readouterr().err
    assert output.startswith(f"error: no max_length ({__file__}, line ")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("error", "called"), [(ConfigError("x"), "fail()"), (SlotsError("x"), "library(fail)")]
)
def test_the_end_of_a_run_names_the_call_of_fit(error: TrialflowError, called: str) -> None:
    """It is raised wherever the script is just then; a mistake, where the trial makes it."""
    namespace: dict[str, Any] = {}
    source = compile("def library(call): call()", f"{shown.LIBRARY}/fit.py", "exec")
    exec(source, namespace)
    library = namespace["library"]

    def fail() -> None:
        raise error  # fail()

    with pytest.raises(TrialflowError) as caught:
        library(fail)
    place = shown._place(error, caught.value.__traceback__)
    line = int(place.rpartition("line ")[2].rstrip(")"))
    assert called in Path(__file__).read_text().splitlines()[line - 1]


@pytest.mark.long
@pytest.mark.slots
def test_under_torchrun_a_refusal_is_shown_once(tmp_path: Path) -> None:
    """The only traceback is torchrun's own."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = start("torchrun", tmp_path, 2, str(script))
    assert output.count(REFUSED) == 1
    assert f"({script}, line 4)" in output
    assert f'File "{script}"' not in output
