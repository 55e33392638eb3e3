"""Runs a contestant, disturbs it, and measures from outside: by the ranks' records alone.

The harness also plays a person: if nothing else continues a run, it does so after a fixed time, and
counts a hand.
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import psutil

from benchmarks.goodput.contestants import Contestant
from benchmarks.goodput.failures import Failure
from benchmarks.goodput.workload import Job, hang_file
from tests.support.faults.plan import Fault, Plan
from tests.support.faults.s3 import FaultyS3

POLL_SECONDS = 0.05
# A person notices that a run has ended or hangs, and starts it again: quick for a person.
HAND_SECONDS = 30.0
# Without a batch for so long, a run that is not over counts as hung. A start takes less.
STUCK_SECONDS = 180.0
# Ranks whose launcher is gone may train on.
ORPHAN_SECONDS = 10.0
END_SECONDS = 60.0
MOST_HANDS = 20
LEFT_AFTER_SECONDS = 10.0


class Line(NamedTuple):
    """A trained batch, as a rank noted it.

    Attributes:
        at: when the batch ended, in seconds since the epoch.
        weights: the weights' digest after it; rank 0's only.
    """

    batch: int
    at: float
    pid: int
    weights: int


@dataclass
class Outcome:
    """The observations of a run.

    Attributes:
        seconds: from the end of the first batch to the end of the last one. The launch is left
            out: both runs have it, and other work on the machine changes it most.
        trained: the number of trained batches; repeated batches count each time.
        weights: digest by batch, of the last time that it was trained.
        changed: the first batch after which the weights were others when it was trained again.
        gaps: seconds from each failure to the end of the first batch of a new process.
        failed: kind of each failure, seconds since the first batch, and the last batch before it.
        hands: by kind of failure, the reason for a hand.
        hand_count: how often there was one.
        left: command lines of processes that outlived their run, or their launcher at a hand.
        curve: (seconds since the first batch, batch) at some batches.
    """

    seconds: float
    trained: int
    weights: dict[int, int]
    failed: list[tuple[str, float, int]]
    hands: dict[str, str] = field(default_factory=dict)
    hand_count: int = 0
    left: list[str] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)
    changed: int | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def twice(self) -> int:
        """The number of repeated batches, each time counted."""
        return self.trained - len(self.weights)

    def costs(self, undisturbed: Outcome) -> dict[str, float]:
        """Return the seconds that each kind of failure cost.

        That is the time from the failure to the next one, or to the end, less the time of as many
        batches in the undisturbed run.
        """
        last = max(self.weights)
        pace = undisturbed.seconds / (last - 1)
        ends = [(at, batch) for _, at, batch in self.failed[1:]] + [(self.seconds, last)]
        return {
            kind: until - at - (reached - batch) * pace
            for (kind, at, batch), (until, reached) in zip(self.failed, ends, strict=True)
        }


def summed_up(lines: Sequence[Line], failed: Sequence[tuple[str, float]] = ()) -> Outcome:
    """Return the times and batches of a run.

    Args:
        lines: the lines of rank 0, in the order of their writing.
        failed: kind and time of each failure.
    """
    began, last = lines[0].at, {line.batch: line.weights for line in lines}
    stride = max(1, len(lines) // 400)
    return Outcome(
        seconds=lines[-1].at - began,
        trained=len(lines),
        weights=last,
        failed=[
            (kind, at - began, [line.batch for line in lines if line.at <= at][-1])
            for kind, at in failed
        ],
        curve=[(line.at - began, line.batch) for line in lines[::stride]],
        changed=first_difference({line.batch: line.weights for line in reversed(lines)}, last),
        gaps=[after[0] - at for _, at in failed if (after := _of_new_process(lines, at))],
    )


def _of_new_process(lines: Sequence[Line], failed_at: float) -> list[float]:
    """Return when the batches of another process than that of the failure have ended."""
    (*_, before) = (line for line in lines if line.at <= failed_at)
    return [line.at for line in lines if line.at > failed_at and line.pid != before.pid]


def first_difference(run: dict[int, int], undisturbed: dict[int, int]) -> int | None:
    """Return the first batch after which the weights differ, or None."""
    differing = [batch for batch, weights in run.items() if undisturbed.get(batch) != weights]
    return min(differing, default=None)


def adopt_orphans() -> None:
    """Make this process the parent of processes below it whose parent has ended."""
    set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


class Harness:
    """One run of a contestant, with failures.

    Args:
        storage: the proxy in front of the S3 gateway.
        outage_seconds: the length of the storage's outage.
        seconds: the run is stopped so long after its first batch; None to see all its batches.
    """

    def __init__(
        self, run: Contestant, job: Job, failures: Sequence[Failure], storage: FaultyS3,
        outage_seconds: float, seconds: float | None = None,
    ) -> None:  # fmt: skip
        self._run, self._job, self._failures = run, job, [*failures]
        self._storage, self._outage_seconds = storage, outage_seconds
        self._around = {each.pid for each in below(())}
        self._records: dict[int, Record] = {}
        self._seconds = seconds
        self._ranks = job.micro_batches
        self._failed: list[tuple[str, float]] = []
        self._hands: dict[str, str] = {}
        self._hand_count = 0
        self._outlived: list[str] = []
        self._away_until = 0.0

    def measure(self) -> Outcome:
        """Start the run, and follow it to its last batch and its end.

        Raises:
            TimeoutError: the run does not end, even with hands.
        """
        self._touched = time.time()
        try:
            self._run.start(self._ranks)
            self._see_it_through()
        except BaseException:
            _killed(below(self._around))
            raise
        outcome = summed_up(self._lines(0), self._failed)
        outcome.hands, outcome.hand_count = self._hands, self._hand_count
        outcome.left = self._outlived + killed_after_a_while(self._around)
        return outcome

    def _see_it_through(self) -> None:
        while not self._is_done():
            time.sleep(POLL_SECONDS)
            if self._failures and self._is_ready():
                self._fail(self._failures.pop(0))
            elif why := self._needs_hand():
                self._lend_hand(why)
                self._hand_count += 1
            if self._hand_count > MOST_HANDS:
                raise TimeoutError(f"{self._hand_count} hands did not bring the run to its end")
        if self._seconds is not None:
            self._run.stop()
        deadline = time.time() + END_SECONDS
        while not self._run.has_ended() and time.time() < deadline:
            time.sleep(POLL_SECONDS)

    def _is_done(self) -> bool:
        if self._seconds is not None:
            lines = self._lines(0)
            return bool(lines) and time.time() - lines[0].at >= self._seconds
        return all(
            (lines := self._lines(rank)) and lines[-1].batch >= self._job.batches
            for rank in range(self._ranks)
        )

    def _is_ready(self) -> bool:
        """Return whether the run trains, has its storage, and reached the next failure."""
        lines, failure = self._lines(0), self._failures[0]
        return (
            bool(lines)
            and lines[-1].batch >= failure.batch
            and time.time() - max(lines[0].at, self._touched) >= failure.after_seconds
            and lines[-1].at > self._touched
            and time.time() > self._away_until
        )

    def _fail(self, failure: Failure) -> None:
        kind, ranks = failure.kind, self._processes()
        self._say(f"{kind} at batch {self._lines(0)[-1].batch}")
        self._touched = time.time()
        self._failed.append((kind, self._touched))
        if kind == "rank":
            _send(signal.SIGKILL, [ranks[rank] for rank in ranks if rank == failure.rank])
        elif kind == "all":
            _send(signal.SIGKILL, ranks.values())
        elif kind in ("driver", "preempt"):
            driver = self._run.driver(next(iter(ranks.values()))) if ranks else None
            number = signal.SIGKILL if kind == "driver" else signal.SIGTERM
            # Ranks whose launcher an earlier failure has killed are all that is left of the run.
            _send(number, [driver] if driver else ranks.values())
        elif kind == "hang":
            hang_file(self._job, failure.rank).touch()
        elif kind == "storage":
            self._away_until = time.time() + self._outage_seconds
            self._storage.plan = Plan(Fault("503", times=None))
            Timer(self._outage_seconds, setattr, (self._storage, "plan", Plan())).start()
        elif kind == "ranks":
            self._run.stop()
            self._wait_for_end([*ranks.values()])
            self._ranks = 1
            self._run.start(self._ranks)

    def _wait_for_end(self, ranks: Sequence[psutil.Process]) -> None:
        deadline = time.time() + END_SECONDS
        while time.time() < deadline and not (
            self._run.has_ended() and not any(map(_is_running, ranks))
        ):
            time.sleep(POLL_SECONDS)
        _killed(below(self._around))

    def _needs_hand(self) -> str:
        """Return why a person has to continue the run; empty if that is not needed."""
        lines = self._lines(0)
        seen = max(self._touched, self._away_until, lines[-1].at if lines else 0.0)
        quiet = time.time() - seen
        if quiet > ORPHAN_SECONDS and self._run.has_ended():
            return "it ended"
        return f"no batch for {STUCK_SECONDS:g} s" if quiet > STUCK_SECONDS else ""

    def _lend_hand(self, why: str) -> None:
        kind = self._failed[-1][0] if self._failed else "start"
        self._say(f"needs a hand after {kind}: {why}")
        self._hands[kind] = why
        time.sleep(HAND_SECONDS - (ORPHAN_SECONDS if why == "it ended" else 0.0))
        has_ended = self._run.has_ended()
        killed = _killed(below(self._around))
        self._outlived += killed if has_ended else []
        self._run.start(self._ranks)
        self._touched = time.time()

    def _processes(self) -> dict[int, psutil.Process]:
        """Return the ranks' live processes, by rank."""
        found = {}
        for rank in range(self._ranks):
            with suppress(psutil.NoSuchProcess):
                found[rank] = psutil.Process(self._lines(rank)[-1].pid)
        return found

    def _lines(self, rank: int) -> list[Line]:
        if rank not in self._records:
            self._records[rank] = Record(Path(self._job.folder, f"rank-{rank}.txt"))
        return self._records[rank].lines()

    def _say(self, what: str) -> None:
        print(f"  {time.strftime('%H:%M:%S')} {what}", flush=True)


def below(around: Container[int]) -> list[psutil.Process]:
    """Return the live processes below this one, except for the ids `around`."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.pid not in around and _is_running(each)]


def killed_after_a_while(around: Container[int]) -> list[str]:
    """Kill the processes that do not end by themselves. Return their command lines."""
    deadline = time.time() + LEFT_AFTER_SECONDS
    while (left := below(around)) and time.time() < deadline:
        time.sleep(POLL_SECONDS)
    return _killed(left)


class Record:
    """A rank's record, read as it grows: reading it whole each time would slow the ranks down."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        """Return all lines so far; an unfinished one is left out."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text, _, _ = file.read().rpartition(b"\n")
            if text:
                self._read_bytes += len(text) + 1
                self._lines += [
                    Line(int(batch), float(at), int(pid), int(digest))
                    for batch, at, pid, digest in map(bytes.split, text.split(b"\n"))
                ]
        return self._lines


def _send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _killed(processes: Sequence[psutil.Process]) -> list[str]:
    """Kill processes. Return their command lines."""
    commands = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline())[:120])
            process.kill()
    return commands
