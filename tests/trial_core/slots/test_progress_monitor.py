"""What counts as a sign that ranks get on, and for which of a group's requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trial_core.errors import Stalled
from trial_core.messages import AnyRequest, Done, Ping, RunValidation, TrainBatches
from trial_core.slots import progress_monitor
from trial_core.slots.group import SlotGroup
from trial_core.slots.launcher import RankProcess
from trial_core.slots.progress_monitor import ProgressMonitor


class Ranks:
    """A rank that writes what a test says, and a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        self.bytes = 0
        monkeypatch.setattr(
            progress_monitor, "time", SimpleNamespace(monotonic=lambda: self.seconds)
        )
        self.signs = ProgressMonitor([self])

    def written_bytes(self) -> int:
        return self.bytes

    def silence(self, after_seconds: float, writing: int, request: AnyRequest) -> float:
        self.seconds += after_seconds
        self.bytes += writing
        return self.signs.silence_seconds(request)


@pytest.mark.parametrize("request_", [TrainBatches(until=5), RunValidation()])
def test_where_batches_are_due_nothing_else_counts(
    monkeypatch: pytest.MonkeyPatch, request_: AnyRequest
) -> None:
    """Ranks that hang may go on to complain about it in their logs."""
    ranks = Ranks(monkeypatch)
    assert ranks.silence(7, 100, request_) == 7
    assert ranks.silence(4, 100, request_) == 11
    ranks.signs.note()
    assert ranks.silence(3, 0, request_) == 3


def test_where_none_are_due_whoever_writes_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that downloads may take hours; one that is silent may not. It is looked at often
    enough to tell the two apart."""
    ranks = Ranks(monkeypatch)
    assert ranks.silence(7, 100, Ping()) == 0
    assert ranks.silence(4, 0, Ping()) == 4
    assert ranks.signs.look_again_seconds(Ping(), 20) == 2
    assert ranks.signs.look_again_seconds(Ping(), 4.5) == pytest.approx(0.45)
    assert ranks.silence(3, 0, Ping()) == 7
    assert ranks.silence(3, 1, Ping()) == 0


def test_what_a_rank_writes_is_seen(tmp_path: Path) -> None:
    """Bytes of a file as well as those of its log."""
    log, file = tmp_path / "log", tmp_path / "file"
    log.touch()
    write = f"import sys; sys.stdin.read(1); open({str(file)!r}, 'wb').write(bytes(2**20)); "
    process = subprocess.Popen(
        [sys.executable, "-c", write + "print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        rank = RankProcess(0, process, log, lambda rank, code: None)
        before = rank.written_bytes()
        log.write_text("a line\n")
        assert rank.written_bytes() == before + len("a line\n")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.readline()
        seen = rank.written_bytes() - before
        rank.kill()
        rank.wait(20)
    if not _is_on_a_disk(tmp_path):
        pytest.skip(f"{tmp_path} is no disk: Linux does not count what is written there")
    assert seen >= 2**20


def _is_on_a_disk(folder: Path) -> bool:
    """Whether Linux counts what this process writes there."""
    io = Path(f"/proc/{os.getpid()}/io")
    before = io.read_text().split("\nwrite_bytes")[1]
    (folder / "own").write_bytes(bytes(2**20))
    return io.read_text().split("\nwrite_bytes")[1] != before


@pytest.mark.slots
def test_a_rank_that_hangs_is_found_once_it_writes_no_more(tmp_path: Path) -> None:
    """It logs lines for longer than it may be silent, and then nothing."""
    written: list[float] = []

    def write(log: Path) -> None:
        with log.open("a") as file:
            for _ in range(30):
                file.write("still at it\n")
                file.flush()
                written.append(time.monotonic())
                time.sleep(0.05)

    with SlotGroup(1, working_dir=tmp_path, log_dir=tmp_path) as slots:
        os.kill(slots.pids[0], signal.SIGSTOP)  # it will never answer
        writing = threading.Thread(target=write, args=(tmp_path / "rank-0.log",))
        writing.start()
        with pytest.raises(Stalled, match="no rank has written anything for 1 s during Ping"):
            slots.request(Ping(), Done, stall_seconds=1.0)
        writing.join()
    assert len(written) == 30
    assert time.monotonic() - written[-1] >= 1.0
