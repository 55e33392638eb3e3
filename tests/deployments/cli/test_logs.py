"""`trialflow logs`: from the run's folder, and from the storage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.waiting import until
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.machine.run_dirs import locked_run_dir
from trialflow.deployments.cli.console import REFUSED
from trialflow.deployments.cli.main import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_log_of_this_machine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, without control characters; of another rank by its number."""
    logs = home / "toy-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_bytes(b"10 %\r20 %\r\n\x1b[31mred\x1b[0m \xff\nlast")
    (logs / "rank-1.log").write_text("another\n")
    assert main(["logs", "toy"]) == 0
    assert capsys.readouterr().out == "10 %\n20 %\nred \N{REPLACEMENT CHARACTER}\nlast"
    assert main(["logs", "toy-1", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "another\n"


def test_it_follows_a_run_to_its_end(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is written before the run ends is printed; then the command ends."""
    shown: list[str] = []

    def seen() -> str:
        shown.append(capfd.readouterr().out)
        return "".join(shown)

    with locked_run_dir("toy-1") as folder:
        (folder / "logs").mkdir()
        with (folder / "logs" / "rank-0.log").open("w", buffering=1) as log:
            log.write("first\n")
            follower = threading.Thread(target=main, args=[["logs", "toy-1", "--follow"]])
            follower.start()
            until(lambda: "first" in seen(), "the first line")
            log.write("second\n")
            until(lambda: "second" in seen(), "the second line")
            log.write("third\n")
    follower.join(30)
    assert seen() == "first\nsecond\nthird\n"


def test_a_log_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest in the storage. Without one, the error says which logs there are."""
    store = CheckpointStore(str(tmp_path / "storage"))
    for when, line in (("20310509T080000Z-b", "new"), ("20310508T090000Z-a", "old")):
        name = f"logs/{when}/rank-0.log"
        store.storage.write(layout.run_file_key("toy-1", name), f"{line}\n".encode())
    assert main(["logs", "toy-1", "--storage", store.url]) == 0
    assert capsys.readouterr().out == "new\n"
    assert main(["logs", "toy-1", "--rank", "7", "--storage", store.url]) == REFUSED
    assert "which has: rank-0.log" in capsys.readouterr().err
    assert main(["logs", "zzz", "--storage", store.url]) == REFUSED
    assert "no trial zzz has run on this machine" in capsys.readouterr().err
