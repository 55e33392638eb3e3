"""The sender: a process next to the driver that sends the trial's journal to the trackers.

`SenderProcess` is the driver's side of it. Standard input holds one line of JSON, the order, then a
byte for each new record, and `END` when the run has ended. If standard input itself ends, the
driver has. The process prints news for people, a line each. It ends when all is sent, or after
`SenderOrder.patience_seconds`; after a few seconds if the driver was killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import msgspec

from trial_core.common import text_format
from trial_core.common.decoding import decode
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, SENDER_LOG, age, read_state
from trial_core.observe.trackers.outbox import Outbox
from trial_core.observe.trackers.tracker import TrackedRun, Tracker, find_tracker
from trial_core.processes.machine.child import Child
from trial_core.processes.machine.system_use import SystemUse

NICENESS = 5
END = b"."
KILLED_PATIENCE_SECONDS = 5.0
SYSTEM_SECONDS = 30.0


class SenderOrder(msgspec.Struct, kw_only=True):
    """The task of the sender."""

    trial: str
    experiment: str
    run_dir: str
    trackers: dict[str, dict[str, Any]]
    patience_seconds: float  # how long it sends after the run has ended
    measures: bool = True  # True if it also sends the machine's metrics
    is_adopted: bool = False  # True if it comes from the trial's storage, which others may write to


class SenderProcess:
    """The sender, as the driver sees it. Its trackers' output is in ``logs/trackers.log``; `hear`
    is called in a thread with news for people. Raises OSError if it cannot be started."""

    def __init__(
        self, order: SenderOrder, variables: Mapping[str, str], hear: Callable[[str], None]
    ) -> None:
        path = Path(order.run_dir) / SENDER_LOG
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            command = ["-m", "trial_core.observe.trackers.sender"]
            self._child = Child(command, variables, log=log, answers=True)
        self._child.tell(msgspec.json.encode(order) + b"\n")
        self._listener = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._listener.start()

    def wake(self) -> bool:
        """Tell it that there are new records. Return whether it lives."""
        self._child.wake(b"\n")
        return self._child.lives()

    def end(self, wait: Callable[[Callable[[float], bool]], bool]) -> None:
        """Tell it that no more records come; `wait` for its end, like `Ending.wait`; then kill it
        with its child processes."""
        self._child.wake(END)
        self._child.close_input()
        wait(self._child.wait)
        self._child.kill()
        self._listener.join(1.0)

    def _listen(self, hear: Callable[[str], None]) -> None:
        for line in self._child.lines():
            hear(text_format.clean(line.decode(errors="replace").strip()))


def main() -> None:
    """Send to each tracker, until all is sent or time is over."""
    os.nice(NICENESS)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the trackers' packages is for the log

    def say(line: str) -> None:
        with suppress(OSError):  # the driver was killed
            print(line, file=said, flush=True)

    with open(0, "rb", buffering=0, closefd=False) as given:  # without reading ahead
        order = decode(given.readline(), SenderOrder)
    folder = Path(order.run_dir) / FOLDER
    # The sender of a killed driver may still be sending.
    with filelock.FileLock(folder / "lock", timeout=4 * KILLED_PATIENCE_SECONDS):
        outboxes = [_outbox(order, name, say) for name in order.trackers]
        for outbox in outboxes:
            outbox.thread.start()
        has_ended = False
        while not has_ended and (wakes := os.read(0, 4096)):
            has_ended = END in wakes
            for outbox in outboxes:
                outbox.wake()
        for outbox in outboxes:
            outbox.end()
        patience = order.patience_seconds if has_ended else KILLED_PATIENCE_SECONDS
        deadline = time.monotonic() + patience
        for outbox in outboxes:
            outbox.thread.join(max(0.0, deadline - time.monotonic()))
        has_hung = any(outbox.thread.is_alive() for outbox in outboxes)
    if has_hung:  # it, and the trackers' exit hooks, would hold this process up
        os.killpg(0, signal.SIGKILL)


def _outbox(order: SenderOrder, name: str, say: Callable[[str], None]) -> Outbox:
    run_dir = Path(order.run_dir)
    folder = run_dir / FOLDER
    run = TrackedRun(order.trial, order.experiment, folder / name, run_dir)
    run.folder.mkdir(exist_ok=True)
    kind = find_tracker(name)
    system = SystemUse(SYSTEM_SECONDS) if order.measures and not kind.measures_the_system else None
    new: partial[Tracker] = partial(kind, order.trackers[name], run)
    return Outbox(name, new, folder / JOURNAL, folder / f"{name}.json", say, system)


def unsent(run_dir: Path, trackers: Sequence[str]) -> dict[str, int]:
    """The number of records that each tracker lacks, for trackers that lack some."""
    journal = run_dir / FOLDER / JOURNAL
    _, count = age(journal.read_bytes()) if journal.exists() else (0, 0)
    left = {name: count - read_state(run_dir / FOLDER / f"{name}.json").sent for name in trackers}
    return {name: count for name, count in left.items() if count > 0}


if __name__ == "__main__":
    main()
