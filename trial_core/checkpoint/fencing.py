"""Fencing: of all attempts at a trial the last one alone may commit.

An attempt that was taken for dead is not always dead: its machine slept, its network was gone.
Meanwhile another one goes on with the trial, and must not find checkpoints under its feet that the
first has saved since. So each attempt, before it looks at what there is, takes the next number::

    attempts/{trial}/{number:06d}.json     who it is, and since when

It is created only if nobody has it, so of two attempts at once one is the later. An attempt after
which another has come is superseded. It is told so before it uploads and before it commits.

What it had begun before is decided with each checkpoint's manifest; see `committing`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.errors import CommitConflict, StorageError, Superseded
from trial_core.storage.base import Storage

KEPT = 8
"""How many attempts at a trial stay written down; older ones tell nobody anything."""

_TRIES = 20

_logger = logging.getLogger(__name__)


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """That an attempt has taken a trial over.

    Attributes:
        trial: which.
        number: of the attempt, among all at this trial: the highest may commit.
        attempt: its id.
        by: who drives it: ``user@host``.
        at: when it took over: ISO 8601, UTC.
    """

    trial: str
    number: int
    attempt: str
    by: str
    at: str


class Fence:
    """What an attempt holds while it trains: its number. Safe to use from several threads.

    Args:
        token: what it has written down in that storage.
    """

    def __init__(self, storage: Storage, token: AttemptRecord) -> None:
        self._storage = storage
        self.token = token

    @property
    def number(self) -> int:
        """The attempt's number; later ones have higher ones."""
        return self.token.number

    def is_last(self) -> bool:
        """Whether no other attempt has come since. One request."""
        return max(_numbers(self._storage, self.token.trial), default=0) <= self.number

    def check(self, what: str) -> None:
        """Refuse to go on if another attempt has come since. One request, unless it refuses.

        Args:
            what: what is refused then, as a sentence without its end: ``"checkpoint u is not …"``.

        Raises:
            Superseded: says by whom, where, and since when.
        """
        if not self.is_last():
            raise self.superseded(what)

    def superseded(self, what: str) -> Superseded:
        """The error that says who has come since; see `check`."""
        own = self.token
        last = max(_numbers(self._storage, own.trial), default=0)
        data = self._storage.read(layout.attempt_key(own.trial, last))
        try:
            token = msgspec.json.decode(data or b"", type=AttemptRecord)
            who = f"attempt {token.attempt}, by {token.by}, has taken over at {token.at}"
        except (msgspec.MsgspecError, UnicodeDecodeError):  # half of one; or tidied since
            who = "another attempt has taken over since"
        return Superseded(
            f"{what}: trial {own.trial} is not this attempt's any more. {who}, as number {last}; "
            f"this is attempt {own.attempt}, by {own.by}, number {own.number} of {own.at}. It was "
            "taken for dead, or the trial was started twice: end this one, and let the other go on"
        )


def take_over(storage: Storage, trial: str, attempt: str, after: int | None = None) -> Fence:
    """See `CheckpointStore.take_over`.

    Args:
        after: take over from the attempt of that number alone, not from one that has come since.
    """
    for _ in range(_TRIES):
        numbers = _numbers(storage, trial)
        number = max(numbers, default=0) + 1
        if after is not None and number != after + 1:
            raise CommitConflict(
                f"trial {trial} is not taken over from attempt number {after}: number {number - 1} "
                f"has come since, in {storage.url}; leave the trial to it"
            )
        token = AttemptRecord(
            trial=trial, number=number, attempt=attempt, by=user_at_host(), at=utc_now()
        )
        try:
            storage.create(layout.attempt_key(trial, number), encode_json(token))
        except FileExistsError:
            continue  # somebody else was quicker, and will be superseded
        _tidy(storage, trial, numbers)
        return Fence(storage, token)
    raise CommitConflict(
        f"attempt {attempt} cannot take trial {trial} over: in {storage.url}, others took over "
        f"{_TRIES} times while it tried; find out who starts this trial again and again"
    )


def last_attempts(storage: Storage, trial: str) -> Iterator[tuple[int, AttemptRecord | None]]:
    """The attempts at a trial that are written down, the last one first: the number of each, and
    what it has said; None where that cannot be read."""
    for number in sorted(_numbers(storage, trial), reverse=True):
        data = storage.read(layout.attempt_key(trial, number))
        try:
            yield number, msgspec.json.decode(data or b"", type=AttemptRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            yield number, None


def _numbers(storage: Storage, trial: str) -> list[int]:
    """The numbers of the attempts at a trial that are written down."""
    keys = storage.sizes(layout.attempts_folder(trial))
    return [number for key in keys if (number := layout.parse_attempt_key(key)) is not None]


def _tidy(storage: Storage, trial: str, numbers: list[int]) -> None:
    """Forget attempts of long ago. The oldest first: whoever misses one must see a later one."""
    for number in sorted(numbers)[: -(KEPT - 1)]:
        try:
            storage.remove(layout.attempt_key(trial, number))
        except StorageError as error:
            _logger.warning("left until trial %s is taken over again: %s", trial, error)
            return
