"""The stored ledger: one small object a run, written by that run alone, each minute and at its end.

So a killed run's time is counted up to its last minute, and no run overwrites another's object.
Keeping the ledger neither fails nor delays a run: a thread writes, and a failure is a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_json, encode_json, named_keys, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.any_logger import AnyLogger
from trial_core.errors import CheckpointDamaged, StorageError
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.ledger.time_ledger import RunTime, TimeLedger
from trial_core.schedule.ending import Ending

WRITE_SECONDS = 60.0

_logger = logging.getLogger(__name__)


def read_ledger(store: CheckpointStore, trial: str) -> TimeLedger:
    """The stored ledger of a trial. Unreadable records cause a warning, and are left out. Raises
    CheckpointError if no trial may have this id; StorageError."""
    folder = layout.ledger_folder(trial)
    found = named_keys(store.storage, folder, lambda key: layout.parse_numbered_key(folder, key))

    def read(name: tuple[str, int]) -> RunTime | None:
        key, number = name
        try:
            data = store.storage.read(key)
        except CheckpointDamaged as error:
            _logger.warning("the ledger lacks a run: %s", error)
            return None
        if data is None:
            return None
        record = decode_json(data, RunTime)
        if record is None:
            _logger.warning(
                "the ledger lacks a run: %s/%s is not a readable record", store.url, key
            )
            return None
        return msgspec.structs.replace(record, number=number)

    return TimeLedger(trial, tuple(read_all(read, found)))


class KeptLedger:
    """The ledger of a trial, with the run in progress; a context manager for that run's driver.

    The block tells `clock`, which measures the run, what earlier runs have trained.
    """

    def __init__(
        self,
        store: CheckpointStore,
        trial: str,
        number: int,
        clock: RunClock,
        ending: Ending,
        per_slot_hour: float | None = None,  # the price of an hour of one slot
        logger: AnyLogger = _logger,
    ) -> None:
        self._store = store
        self._trial = trial
        self._number = number
        self._clock = clock
        self._ending = ending
        self._per_slot_hour = per_slot_hour
        self._logger = logger
        self._has_warned = False
        self._final: RunTime | None = None
        self.earlier: Sequence[RunTime] = ()  # oldest first; empty before the block
        began = datetime.now(timezone.utc) - timedelta(seconds=clock.seconds)
        self._began_at = began.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._by = user_at_host()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="ledger", daemon=True)

    def __enter__(self) -> KeptLedger:
        try:
            self.earlier = read_ledger(self._store, self._trial).runs
        except StorageError as error:
            self._logger.warning(
                "the ledger of time lacks the trial's earlier runs, which cannot be read: %s", error
            )
        self._clock.continues(max((run.trained_to for run in self.earlier), default=0))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        if not self._ending.join(self._thread):
            self._logger.warning(
                "the run's last minute may be missing in the ledger of time: the storage did not "
                "take it in time"
            )

    def read(self) -> TimeLedger:
        """The trial's ledger until now; after the block, until the run's end."""
        return TimeLedger(self._trial, (*self.earlier, self._final or self._record()))

    def _record(self) -> RunTime:
        return RunTime(
            number=self._number,
            by=self._by,
            began_at=self._began_at,
            until=utc_now(),
            is_over=self._has_ended.is_set(),
            slots=self._clock.slots,
            trained_to=self._clock.trained_to,
            per_slot_hour=self._per_slot_hour,
            slot_milliseconds=self._clock.slot_milliseconds(),
        )

    def _keep_writing(self) -> None:
        while True:
            record = self._record()
            if record.is_over:
                self._final = record
            self._write(record)
            if record.is_over:
                return
            self._has_ended.wait(WRITE_SECONDS)

    def _write(self, record: RunTime) -> None:
        key = layout.ledger_key(self._trial, self._number)
        try:
            self._store.storage.write(key, encode_json(record))
        except StorageError as error:
            if not self._has_warned:
                self._logger.warning(
                    "the ledger of time is not stored (logged once; training continues): %s", error
                )
            self._has_warned = True
