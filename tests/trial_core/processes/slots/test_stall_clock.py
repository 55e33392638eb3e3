"""What counts as progress for which request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.slots import OwnSlots
from trial_core.errors import Stalled
from trial_core.messages import (
    AnyRequest,
    Done,
    PersistCheckpoint,
    Ping,
    Result,
    RunScript,
    RunValidation,
    TrainBatches,
)
from trial_core.processes.slots import stall_clock
from trial_core.processes.slots.fork_server import RankProcess
from trial_core.processes.slots.pending_requests import PendingRequests
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.processes.slots.stall_clock import StallClock


class FakeRank:
    """A rank whose written bytes, and a clock whose time, the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        self.bytes = 0
        monkeypatch.setattr(stall_clock, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        self.monitor = StallClock([self])

    def written_bytes(self) -> int:
        return self.bytes

    def silence(self, after_seconds: float, writing: int, request: AnyRequest) -> float:
        self.seconds += after_seconds
        self.bytes += writing
        return self.monitor.seconds_without_progress(request)


@pytest.mark.parametrize("request_", [TrainBatches(until=5), RunValidation()])
def test_writes_do_not_count_while_batches_are_due(
    monkeypatch: pytest.MonkeyPatch, request_: AnyRequest
) -> None:
    """Hung ranks may still log warnings."""
    rank = FakeRank(monkeypatch)
    assert rank.silence(7, 100, request_) == 7
    assert rank.silence(4, 100, request_) == 11
    rank.monitor.note_progress()
    assert rank.silence(3, 0, request_) == 3


def test_without_batches_writes_count_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked several times per stall timeout."""
    rank = FakeRank(monkeypatch)
    assert rank.silence(7, 100, Ping()) == 0
    assert rank.silence(4, 0, Ping()) == 4
    assert rank.monitor.next_check_seconds(Ping(), 20) == 2
    assert rank.monitor.next_check_seconds(Ping(), 4.5) == pytest.approx(0.45)
    assert rank.silence(3, 0, Ping()) == 7
    assert rank.silence(3, 1, Ping()) == 0


def test_written_bytes_count_logs_and_files(tmp_path: Path) -> None:
    """A write to the log or to any file on a disk increases them."""
    log, file = tmp_path / "log", tmp_path / "file"
    log.touch()
    write = f"import sys; sys.stdin.read(1); open({str(file)!r}, 'wb').write(bytes(2**20)); "
    process = subprocess.Popen(
        [sys.executable, "-c", write + "print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        no_server: Any = None
        rank = RankProcess(0, log, no_server, 0, lambda rank, code: None)
        rank.pid = process.pid
        before = rank.written_bytes()
        log.write_text("a line\n")
        assert rank.written_bytes() == before + len("a line\n")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.readline()
        seen = rank.written_bytes() - before
        process.kill()
    if not _is_on_a_disk(tmp_path):
        pytest.skip(f"Linux does not count writes to {tmp_path}, which is not on a disk")
    assert seen >= 2**20


def _is_on_a_disk(folder: Path) -> bool:
    """Whether Linux counts this process's writes there."""
    io = Path(f"/proc/{os.getpid()}/io")
    before = io.read_text().split("\nwrite_bytes")[1]
    (folder / "own").write_bytes(bytes(2**20))
    return io.read_text().split("\nwrite_bytes")[1] != before


class SilentGroup:
    """What `SlotGroup._wait_for` needs, with ranks that write nothing and end no batch."""

    def __init__(self) -> None:
        self._pending = PendingRequests(1)
        self._progress = StallClock([])
        self._failures = SimpleNamespace(
            stalled=lambda pending, seconds: Stalled(pending.request.title)
        )
        self._end_with = lambda failure: failure

    def waits_for(self, request: AnyRequest, stall_seconds: float) -> Future[list[Result]]:
        """Wait in a thread; return how that ends."""
        pending, waited = self._pending.add(request), Future[list[Result]]()

        def wait() -> None:
            try:
                waited.set_result(SlotGroup._wait_for(cast("Any", self), pending, stall_seconds))
            except Stalled as stalled:
                waited.set_exception(stalled)

        threading.Thread(target=wait, daemon=True).start()
        return waited


SCRIPT = RunScript(checkpoint=None, batches_trained=0)


def test_batches_that_hang_in_the_fit_of_a_script_are_noticed() -> None:
    """The script is silent meanwhile, which is neither a hang nor progress."""
    group = SilentGroup()
    training = group.waits_for(TrainBatches(until=5), 0.2)
    script = group.waits_for(SCRIPT, 0.05)
    with pytest.raises(Stalled, match="train-workload"):
        training.result(2)
    assert not script.done()


def test_the_silence_of_a_script_counts_after_what_it_waits_for() -> None:
    """It has hung if it stays silent for the stall timeout once that has ended."""
    group = SilentGroup()
    script = group.waits_for(SCRIPT, 0.5)
    upload = group._pending.add(PersistCheckpoint(uuid="u"))
    time.sleep(0.8)
    ended = time.monotonic()
    group._pending.note(0, upload.number, Done())
    with pytest.raises(Stalled, match="run-script"):
        script.result(3)
    assert time.monotonic() - ended >= 0.5


@pytest.mark.slots
def test_a_hung_rank_is_detected_after_its_last_write(tmp_path: Path) -> None:
    """It logs for longer than the stall timeout, and then writes nothing."""
    written: list[float] = []

    def write(log: Path) -> None:
        with log.open("a") as file:
            for _ in range(30):
                file.write("still running\n")
                file.flush()
                written.append(time.monotonic())
                time.sleep(0.05)

    with OwnSlots(1, working_dir=tmp_path, log_dir=tmp_path) as slots:
        os.kill(slots.pids[0], signal.SIGSTOP)  # it will never answer
        writing = threading.Thread(target=write, args=(tmp_path / "rank-0.log",))
        writing.start()
        with pytest.raises(Stalled, match="no rank has written anything for 1 s during a check"):
            slots.request(Ping(), Done, stall_seconds=1.0)
        writing.join()
    assert len(written) == 30
    assert time.monotonic() - written[-1] >= 1.0


@pytest.mark.slots
def test_a_hung_rank_whose_log_was_deleted_is_detected(tmp_path: Path) -> None:
    """Only its stack is missing."""
    with OwnSlots(1, working_dir=tmp_path, log_dir=tmp_path) as slots:
        os.kill(slots.pids[0], signal.SIGSTOP)
        (tmp_path / "rank-0.log").unlink()
        with pytest.raises(Stalled) as stalled:
            slots.request(Ping(), Done, stall_seconds=0.5)
    assert stalled.value.stacks == ("(no stack in the log)",)
