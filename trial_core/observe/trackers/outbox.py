"""Sends the journal's records to one tracker, each once, however often that fails."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trial_core.common import text_format
from trial_core.observe.trackers.journal import JournalReader, read_state, write_state
from trial_core.observe.trackers.records import AnyRecord, Committed, Deleted, Metrics
from trial_core.observe.trackers.tracker import RecordRefused, Tracker, describe
from trial_core.processes.machine.system_use import SystemUse

AT_ONCE = 500
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
# After the end of the run, for a tracker that fails.
LAST_PAUSE_SECONDS, LAST_TRIES_SECONDS = 0.5, 5.0
REOPENS_AFTER_FAILURES = 3

# A point is new if it is not there, or has another value.
_NEW_POINT = """INSERT INTO points VALUES (?, ?, ?) ON CONFLICT DO UPDATE
SET value = excluded.value WHERE value IS NOT excluded.value"""


class Outbox:
    """Sends to one tracker, in a thread, until the driver has ended and all is sent.

    Args:
        new_tracker: makes it; called in the thread.
        state: the file that remembers the sent records.
        say: tells people of a failure, once until the tracker is reached again.
        system: measures this machine; None: nothing of it is sent.
    """

    def __init__(
        self, name: str, new_tracker: Callable[[], Tracker], journal: Path, state: Path,
        say: Callable[[str], None], system: SystemUse | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._new_tracker = new_tracker
        self._journal = JournalReader(journal)
        self._path = state
        self._say = say
        self._system = system
        self._state = read_state(state)
        self._tracker: Tracker | None = None
        self._pending: list[AnyRecord] = []
        self._checkpoints: list[Committed | Deleted] = []  # sent
        # Values of points after the last checkpoints, which may come again. They are in a temporary
        # file, of which SQLite holds some pages in memory: a run without checkpoints has millions.
        self._points = _new_points()
        self._batches = self._samples = self._attempt = 0
        self._committed = 0
        self._at_once = AT_ONCE
        self._wakes, self._ending = threading.Event(), threading.Event()
        self._failures = 0  # in a row
        self._refused = 0
        self.thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def wake(self) -> None:
        """There are new records."""
        self._wakes.set()

    def end(self) -> None:
        """There will be no more records: the thread ends once all are sent."""
        self._ending.set()
        self._wakes.set()

    def _run(self) -> None:
        self._send_all()
        if self._refused > 1:
            self._say(
                f"tracker {self.name} has refused {text_format.plural(self._refused, 'record')}, "
                "which are left out"
            )
        self._points.close()

    def _send_all(self) -> None:
        pause, gives_up_at = 0.0, math.inf
        while True:
            is_last = self._wait(pause)
            if is_last:
                gives_up_at = min(gives_up_at, time.monotonic() + LAST_TRIES_SECONDS)
            try:
                has_more = self._send_next()
                if is_last and not has_more and self._tracker is not None:
                    self._tracker.close()
            except Exception as error:  # noqa: BLE001 - a tracker's program may raise anything
                pause = min(max(2 * pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
                if not self._failures:
                    self._say(
                        f"tracker {self.name}: {describe(error)}; what it does not get is kept and "
                        "sent later (said once; training continues)"
                    )
                self._failures += 1
                if self._failures % REOPENS_AFTER_FAILURES == 0:
                    self._drop_tracker()
                if time.monotonic() >= gives_up_at:
                    return
                continue
            if self._failures:
                self._say(f"tracker {self.name}: it is reached again")
            self._failures, pause = 0, 0.0
            if has_more:
                self._wakes.set()
            elif is_last:
                return

    def _wait(self, pause: float) -> bool:
        """Wait for records, or `pause` seconds after a failure; True if no more will come."""
        if not pause:
            system = self._system if self._attempt else None
            self._wakes.wait(None if system is None else system.seconds_left())
        elif self._ending.wait(pause):
            time.sleep(LAST_PAUSE_SECONDS)
        self._wakes.clear()  # before the journal is read, as the next line
        return self._ending.is_set()

    def _send_next(self) -> bool:
        """Send some records; return whether there may be more."""
        if self._tracker is None:
            self._skip_sent()
            tracker = self._new_tracker()
            self._state.run = tracker.open(self._state.run)
            tracker.recall(self._checkpoints)
            self._tracker = tracker
            write_state(self._path, self._state)
        self._pending = self._pending or self._journal.read(AT_ONCE)
        if self._pending:
            self._send(self._tracker, self._pending[: self._at_once])
            return True
        if self._system is not None and self._attempt and self._system.seconds_left() == 0:
            self._tracker.send([Metrics(
                at=time.time(), batches=self._batches, samples=self._samples,
                attempt=self._attempt, values=self._system.measure(),
            )])  # fmt: skip
        return False

    def _skip_sent(self) -> None:
        """Read the sent records, for their points and checkpoints; each once in this process."""
        while self._journal.count < self._state.sent:
            records = self._journal.read(min(AT_ONCE, self._state.sent - self._journal.count))
            if not records:
                self._state.sent = self._journal.count  # a copy of the journal lacks its end
                break
            for record in records:
                self._note(record)
            self._checkpoints += _checkpoints(records)
        self._points.commit()

    def _send(self, tracker: Tracker, records: Sequence[AnyRecord]) -> None:
        before = self._committed
        try:
            if new := [kept for each in records if (kept := self._note(each, tracker))]:
                tracker.send(new)
        except RecordRefused as refusal:
            if len(records) > 1:
                self._points.rollback()
                self._committed, self._at_once = before, 1  # to find the culprit
                return
            self._refused += 1
            if self._refused == 1:
                self._say(
                    f"tracker {self.name} does not take a record, which is left out: "
                    f"{describe(refusal)}"
                )
        except Exception:
            self._points.rollback()
            self._committed = before
            raise
        self._pending = self._pending[len(records) :]
        if not self._pending:
            self._at_once = AT_ONCE
        self._checkpoints += _checkpoints(records)
        self._state.sent += len(records)
        self._points.commit()
        write_state(self._path, self._state)

    def _note(self, record: AnyRecord, tracker: Tracker | None = None) -> AnyRecord | None:
        """Note a record's points. Return its new part, without points already sent like that."""
        if isinstance(record, Metrics):
            self._batches, self._samples = record.batches, record.samples
            self._attempt = record.attempt
            new = {}
            for name, value in record.values.items():
                if self._points.execute(_NEW_POINT, (record.batches, name, value)).rowcount:
                    new[name] = value
            if tracker is None or tracker.replaces_points:
                return record
            return msgspec.structs.replace(record, values=new) if new else None
        if isinstance(record, Committed):
            # A resume goes back to it; or to the one before, if it is damaged.
            self._points.execute("DELETE FROM points WHERE batches <= ?", [self._committed])
            self._committed = record.batches
        return record

    def _drop_tracker(self) -> None:
        """Have it opened again: some trackers, like TensorBoard's, do not recover from errors."""
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close()
            self._tracker = None


def _checkpoints(records: Sequence[AnyRecord]) -> list[Committed | Deleted]:
    return [each for each in records if isinstance(each, (Committed, Deleted))]


def _new_points() -> sqlite3.Connection:
    """A table for points in a file without a name, which ends with this process."""
    points = sqlite3.connect("", check_same_thread=False)
    points.execute(
        "CREATE TABLE points (batches INTEGER, name TEXT, value REAL, PRIMARY KEY (batches, name)) "
        "WITHOUT ROWID"
    )
    return points
