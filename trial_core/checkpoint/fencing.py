"""Fencing: of all attempts at a trial, only the newest may commit.

An attempt that is presumed dead may be alive: its machine slept, or its network failed. Another
attempt has taken over its trial meanwhile, and must not find new checkpoints of the older one. So
before an attempt looks for a checkpoint to resume from, it takes the trial's next number: a record
of who took over, and when (`layout.attempt_key`).

The object is create-only, so two attempts at the same time get two numbers. An attempt with a lower
number than the newest is superseded, and is refused when it announces an upload or commits. Numbers
are never reused, also after the run has ended: an attempt may wake up at any time.

An attempt whose own number is missing is refused as well. So is an attempt that finds neither the
mark of its storage (see `storage_mark`) nor its own record: this is another storage, such as the
empty folder of a disk that was unmounted.

`commit` describes how a take-over affects a commit in progress.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, named_keys, read_json, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage_mark import ANOTHER_STORAGE, described, marked, read_mark
from trial_core.errors import CommitConflict, StorageError, Superseded

ATTEMPTS_KEPT = 8
"""How many attempts of a trial stay recorded."""

_TAKE_OVER_TRIES = 20

_logger = logging.getLogger(__name__)


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record that an attempt has taken over a trial.

    Attributes:
        attempt: the attempt's id. In a flow it is the flow run's id, which all its attempts share;
            in a script it is random.
        by: user and machine of its driver: ``user@host``.
        storage: the mark of the storage at that time.
    """

    trial: str
    number: int
    attempt: str
    by: str
    at: str
    storage: str = ""


@dataclass
class Fence:
    """Checks that an attempt is still its trial's newest. Safe to use from several threads."""

    storage: Storage
    record: AttemptRecord

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def attempt(self) -> str:
        return self.record.attempt

    def is_newest(self) -> bool:
        """Return whether the attempt is recorded and no later one has taken over. One request."""
        return self._newest_number() == self.number

    def check(self, consequence: str) -> None:
        """Raise if the attempt may not commit. Two small requests if it may. `consequence` begins
        the error message: the action that is not done then.

        Raises:
            Superseded: a later attempt has taken over; says which one, by whom and when.
            StorageError: this is not the storage that the attempt began with.
        """
        if not self.is_newest() or not self._is_storage_of_begin():
            raise self.refusal(consequence)

    def refusal(self, consequence: str) -> Superseded | StorageError:
        """The error that `check` raises."""
        own, newest = self.record, self._newest_number()
        if newest < own.number or not self._is_storage_of_begin():
            mark, key = read_mark(self.storage), layout.attempt_key(own.trial, own.number)
            seen = f"{described(mark)}, expected {own.storage}; " if mark != own.storage else ""
            return StorageError(
                f"{consequence}: {self.storage.url} is not the storage with which attempt "
                f"{own.attempt} of trial {own.trial} began: {seen}it has no {key} of this attempt. "
                f"{ANOTHER_STORAGE}: it continues from its last checkpoint there"
            )
        key = layout.attempt_key(own.trial, newest)
        other = read_json(self.storage, key, AttemptRecord, is_silent=True)
        who = "another attempt"
        if other is not None:  # readable, and not deleted since
            who = f"attempt {other.attempt}, by {other.by} at {other.at},"
        return Superseded(
            f"{consequence}: {who} has taken over trial {own.trial}, as number {newest}; this is "
            f"attempt {own.attempt}, by {own.by}, number {own.number} of {own.at}. This "
            "attempt was presumed dead, or the trial was started twice: end this run and let the "
            "other one continue"
        )

    def _is_storage_of_begin(self) -> bool:
        """Return whether the mark or the attempt's record is there. Writes a lost mark again."""
        own = self.record
        if read_mark(self.storage) == own.storage:
            return True
        key = layout.attempt_key(own.trial, own.number)
        if read_json(self.storage, key, AttemptRecord, is_silent=True) != own:
            return False
        marked(self.storage, own.storage, lambda: True)
        return True

    def _newest_number(self) -> int:
        # Without a warning of foreign objects: the take-over has named them.
        folder = layout.attempts_folder(self.record.trial)
        numbers = (layout.parse_numbered_key(folder, key) for key in self.storage.sizes(folder))
        return max((number for number in numbers if number is not None), default=0)


def take_over(
    storage: Storage, trial: str, attempt: str, after: int | None = None, mark: str | None = None
) -> Fence:
    """Implements `CheckpointStore.take_over`."""
    attempts = newest_attempts(storage, trial)  # read only if the mark is another one
    found = marked(
        storage, mark, lambda: any(each and each.storage == mark for _, each in attempts)
    )
    for _ in range(_TAKE_OVER_TRIES):
        numbers = [number for _, number in _numbered(storage, trial)]
        number = max(numbers, default=0) + 1
        if after is not None and number != after + 1:
            raise CommitConflict(
                f"trial {trial} in {storage.url} is not taken over: its newest attempt has number "
                f"{number - 1}, expected {after}; leave the trial to that attempt"
            )
        record = AttemptRecord(
            trial=trial, number=number, attempt=attempt, by=user_at_host(), at=utc_now(),
            storage=found,
        )  # fmt: skip
        try:
            storage.create(layout.attempt_key(trial, number), encode_json(record))
        except FileExistsError:
            continue  # another attempt took this number: take the next one, and supersede it
        _delete_old_records(storage, trial, numbers)
        return Fence(storage, record)
    raise CommitConflict(
        f"attempt {attempt} cannot take over trial {trial} in {storage.url}: other attempts took "
        f"the next number {_TAKE_OVER_TRIES} times; find out what keeps starting this trial"
    )


def newest_attempts(storage: Storage, trial: str) -> Iterator[tuple[int, AttemptRecord | None]]:
    """Number and record of each attempt, newest first; None for an unreadable record."""
    for key, number in sorted(_numbered(storage, trial), key=lambda each: each[1], reverse=True):
        yield number, read_json(storage, key, AttemptRecord)


def _numbered(storage: Storage, trial: str) -> list[tuple[str, int]]:
    folder = layout.attempts_folder(trial)
    return named_keys(storage, folder, lambda key: layout.parse_numbered_key(folder, key))


def _delete_old_records(storage: Storage, trial: str, numbers: list[int]) -> None:
    # Oldest first: a listing that misses one must show a later one.
    for number in sorted(numbers)[: -(ATTEMPTS_KEPT - 1)]:
        try:
            storage.remove(layout.attempt_key(trial, number))
        except StorageError as error:
            _logger.warning(
                "an old attempt of trial %s stays recorded until the next take-over: %s",
                trial, error,
            )  # fmt: skip
            return
