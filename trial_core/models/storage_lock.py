"""A lock of plain objects, for storages on which `Storage.create` cannot tell two writers apart.

Who wants to append to what several write says so, and then looks whether anybody else does::

    {folder}/{time}-{unique}.json     who it is, and since when

It has the lock once its own is the only one. Of two who come at once, whoever has written later
sees the other's; so never do both have it. The one whose name sorts first stays and looks again;
the others withdraw, and come again after a pause that chance decides.

It needs a storage whose listings show at once what was written, and clocks that agree to within
minutes: what is older than `LOCK_STALE` was left by somebody who died, and counts no more. Of that
time its owner has but the half, from when it began to take the lock until it writes under it.
"""

from __future__ import annotations

import logging
import random
import time
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import msgspec

from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.errors import StorageError
from trial_core.storage.base import Storage

LOCK_STALE = timedelta(minutes=10)

_TIME = "%Y%m%dT%H%M%S%fZ"
_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0
_SAID_AFTER_SECONDS = 5.0

_logger = logging.getLogger(__name__)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a lock, or wants it.

    Attributes:
        by: ``user@host``.
        at: since when: ISO 8601, UTC.
    """

    by: str
    at: str


class StorageLock:
    """A wish for the lock, and the lock once nobody else wishes for it."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._begun = time.monotonic()
        now = datetime.now(timezone.utc).strftime(_TIME)
        self.key = f"{folder}/{now}-{uuids.uuid4().hex}.json"

    def announce(self) -> None:
        """Say that one wants it."""
        self._storage.write(self.key, encode_json(Owner(by=user_at_host(), at=utc_now())))

    def others(self) -> list[str]:
        """The keys of all others that count, the first one first."""
        return [key for key, at in self._others() if not _is_stale(at)]

    @property
    def is_late(self) -> bool:
        """Whether so much time has passed that nothing may be written under it any more."""
        return time.monotonic() - self._begun > LOCK_STALE.total_seconds() / 2

    def check(self) -> None:
        """Refuse to write under a lock that others may soon take for left behind.

        Raises:
            StorageError: too much time has passed since it was taken.
        """
        if self.is_late:
            raise StorageError(
                f"nothing was written: since this process began to take the lock "
                f"{self._storage.url}/{self.key}, {time.monotonic() - self._begun:.0f} s have "
                f"passed, and {LOCK_STALE.total_seconds() / 2:.0f} s are allowed; the storage is "
                "slow, or this machine was suspended: try again"
            )

    def tidy(self) -> None:
        """Remove what those have left who died. For the one who has the lock."""
        for key, at in self._others():
            if _is_stale(at):
                self._storage.remove(key)

    def let_go(self) -> None:
        """Withdraw. What cannot be removed goes stale."""
        try:
            self._storage.remove(self.key)
        except StorageError as error:
            _logger.warning(
                "others wait up to %d minutes for a lock that nobody has: %s",
                LOCK_STALE.total_seconds() // 60, error,
            )  # fmt: skip

    def _others(self) -> list[tuple[str, datetime]]:
        there = sorted(self._storage.sizes(self._folder))
        return [(key, at) for key in there if key != self.key and (at := _time_of(key)) is not None]


@contextmanager
def locked(storage: Storage, folder: str) -> Iterator[StorageLock]:
    """Alone among all, on whatever machine, who lock that folder, for as long as the block runs.

    Call the lock's `check` before each write.

    Raises:
        StorageError: somebody else has it for longer than anybody may: who.
    """
    lock = _take(storage, folder)
    try:
        yield lock
    finally:
        lock.let_go()


def _take(storage: Storage, folder: str) -> StorageLock:
    start = time.monotonic()
    limit, pause, has_said = 1.5 * LOCK_STALE.total_seconds(), _PAUSE_SECONDS, False
    while True:
        lock = StorageLock(storage, folder)
        try:
            lock.announce()
            others = _wait_for_others(lock)
        except BaseException:
            lock.let_go()
            raise
        if not others:
            return lock
        lock.let_go()
        waited = time.monotonic() - start
        if waited > limit:
            raise StorageError(
                f"cannot lock {storage.url}/{folder}: for {waited:.0f} s others have had it, last "
                f"{_said_by(storage, others[0])}; if nobody promotes or registers anything there, "
                "a clock may be wrong: delete that object"
            )
        if waited > _SAID_AFTER_SECONDS and not has_said:
            has_said = True
            _logger.info("waiting for the lock of %s", _said_by(storage, others[0]))
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _wait_for_others(lock: StorageLock) -> list[str]:
    """Those for whom to withdraw; none: the lock is taken."""
    pause = _PAUSE_SECONDS
    while (others := lock.others()) and lock.key < others[0] and not lock.is_late:
        time.sleep(pause)  # they will withdraw; or one of them has it, and will be done
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    if not others:
        lock.tidy()
    return others


def _said_by(storage: Storage, key: str) -> str:
    try:
        owner = msgspec.json.decode(storage.read(key) or b"", type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # half of one, or gone
        return f"{storage.url}/{key}"
    return f"{owner.by} since {owner.at} ({storage.url}/{key})"


def _time_of(key: str) -> datetime | None:
    """Since when; None where the key is no lock's."""
    moment = key.rpartition("/")[2].partition("-")[0]
    try:
        return datetime.strptime(moment, _TIME).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def _is_stale(at: datetime) -> bool:
    """Whether whoever has written it is taken for dead."""
    return datetime.now(timezone.utc) - at > LOCK_STALE
