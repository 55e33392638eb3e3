"""Fencing: of all attempts at a trial only the newest may commit.

An attempt that is presumed dead may be alive: its machine slept, or its network failed. Another
attempt has taken over its trial meanwhile, and must not find new checkpoints of the older one. So
before an attempt looks for a checkpoint to resume from, it takes the trial's next number::

    attempts/{trial}/{number:06d}.json     who took over, and when

The object is create-only, so two attempts at the same time get two numbers; see `create_only`. An
attempt with a lower number than the newest is superseded, and is refused when it announces an
upload or commits. Numbers are never reused, also after the run has ended: an attempt may wake up at
any time.

`commit` describes what happens to a commit in progress during a take-over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.create_only import create_only
from trial_core.checkpoint.json_objects import decode_json, encode_json, named_keys, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.errors import CommitConflict, StorageError, Superseded
from trial_core.storage.base import Storage

ATTEMPTS_KEPT = 8
"""How many attempts of a trial stay recorded."""

_TAKE_OVER_TRIES = 20

_logger = logging.getLogger(__name__)


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record that an attempt has taken over a trial.

    Attributes:
        trial: the trial's id.
        number: the attempt's number among all attempts at the trial. The highest may commit.
        attempt: the attempt's id. In a flow it is the flow run's id, which all its attempts share;
            in a script it is random. `Manifest.attempt` differs from it in a flow.
        by: user and machine of its driver: ``user@host``.
        at: time of the take-over: ISO 8601, UTC.
    """

    trial: str
    number: int
    attempt: str
    by: str
    at: str


class Fence:
    """An attempt's number, and whether it is still the newest. Safe to use from several threads.

    Args:
        storage: where `record` is stored.
    """

    def __init__(self, storage: Storage, record: AttemptRecord) -> None:
        self._storage = storage
        self.record = record

    @property
    def number(self) -> int:
        """The attempt's number. Later attempts have higher ones."""
        return self.record.number

    @property
    def attempt(self) -> str:
        """The attempt's id."""
        return self.record.attempt

    def is_newest(self) -> bool:
        """Whether no later attempt has taken over. One request."""
        return self._newest_number() <= self.number

    def check(self, consequence: str) -> None:
        """Raise if a later attempt has taken over. One request if not.

        Args:
            consequence: what is not done then, as the start of the error message.

        Raises:
            Superseded: says which attempt has taken over, by whom and when.
        """
        if not self.is_newest():
            raise self.superseded_error(consequence)

    def superseded_error(self, consequence: str) -> Superseded:
        """The error that `check` raises."""
        own = self.record
        newest = self._newest_number()
        data = self._storage.read(layout.attempt_key(own.trial, newest))
        other = decode_json(data or b"", AttemptRecord)
        who = "another attempt"
        if other is not None:  # not half an object, and not deleted since
            who = f"attempt {other.attempt}, by {other.by} at {other.at},"
        return Superseded(
            f"{consequence}: {who} has taken over trial {own.trial}, as number {newest}; this is "
            f"attempt {own.attempt}, by {own.by}, number {own.number} of {own.at}. This "
            "attempt was presumed dead, or the trial was started twice: end this run and let the "
            "other one continue"
        )

    def _newest_number(self) -> int:
        # Without a warning of foreign objects: the take-over has named them.
        folder = layout.attempts_folder(self.record.trial)
        numbers = (layout.parse_numbered_key(folder, key) for key in self._storage.sizes(folder))
        return max((number for number in numbers if number is not None), default=0)


def take_over(storage: Storage, trial: str, attempt: str, after: int | None = None) -> Fence:
    """See `CheckpointStore.take_over`.

    Args:
        after: the newest attempt's number as the caller knows it; refuse if a later one has come.
    """
    for _ in range(_TAKE_OVER_TRIES):
        numbers = [number for _, number in _numbered(storage, trial)]
        number = max(numbers, default=0) + 1
        if after is not None and number != after + 1:
            raise CommitConflict(
                f"trial {trial} in {storage.url} is not taken over: its newest attempt has number "
                f"{number - 1}, expected {after}; leave the trial to that attempt"
            )
        record = AttemptRecord(
            trial=trial, number=number, attempt=attempt, by=user_at_host(), at=utc_now()
        )
        try:
            create_only(
                storage, layout.attempt_key(trial, number), encode_json(record),
                layout.trial_locks_folder(trial),
            )  # fmt: skip
        except FileExistsError:
            continue  # another attempt took this number: take the next one, and supersede it
        _delete_old_records(storage, trial, numbers)
        return Fence(storage, record)
    raise CommitConflict(
        f"attempt {attempt} cannot take over trial {trial} in {storage.url}: other attempts took "
        f"the next number {_TAKE_OVER_TRIES} times; find out what keeps starting this trial"
    )


def newest_attempts(storage: Storage, trial: str) -> Iterator[tuple[int, AttemptRecord | None]]:
    """Number and record of a trial's recorded attempts, newest first. None: unreadable."""
    for key, number in sorted(_numbered(storage, trial), key=lambda each: each[1], reverse=True):
        data = storage.read(key)
        yield number, decode_json(data or b"", AttemptRecord, f"{storage.url}/{key}")


def _numbered(storage: Storage, trial: str) -> list[tuple[str, int]]:
    """Keys and numbers of a trial's recorded attempts."""
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
