"""A lock made of plain objects, for storages without conditional writes.

A process that wants the lock announces itself with an object, then lists the folder::

    {folder}/{time}-{unique}.json     owner and time

It has the lock when its announcement is the only one. If two processes announce at once, each
sees the other's object, so they never both have the lock. The one whose key sorts first keeps its
announcement and lists again; the others withdraw and retry after a random delay.

Requires listings that show new objects immediately, and clocks that agree within minutes. An
announcement's own time by the storage's clock, where it tells one, is compared with this machine's.
Announcements older than `LOCK_STALE` belong to dead processes and are ignored. An owner must
therefore finish its writes within half of that time (`StorageLock.check`).
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

from trial_core.checkpoint.json_objects import (
    decode_json,
    encode_json,
    user_at_host,
    warn_of_foreign_object,
)
from trial_core.checkpoint.manifest import utc_now
from trial_core.errors import StorageError
from trial_core.storage.base import Storage

LOCK_STALE = timedelta(minutes=10)

_TIME = "%Y%m%dT%H%M%S%fZ"
_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 1.0
_LOG_AFTER_SECONDS = 5.0
_RELEASE_PAUSES = (0.0, 0.1, 1.0)

_logger = logging.getLogger(__name__)


class LockOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Who announced a lock.

    Attributes:
        by: ``user@host``.
        at: time of the announcement: ISO 8601, UTC.
    """

    by: str
    at: str


class StorageLock:
    """One announcement. It is the lock once it is the only announcement in the folder."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._announced_at = datetime.now(timezone.utc)
        self._foreign: list[str] = []
        self._key = f"{folder}/{self._announced_at.strftime(_TIME)}-{uuids.uuid4().hex}.json"

    def acquire(self) -> str | None:
        """Announce, and wait for announcements that sort later to be withdrawn.

        Returns:
            None: this process has the lock. Otherwise the key of an announcement that blocks it.

        Raises:
            StorageError: the storage failed, or its clock and this machine's differ.
        """
        self._storage.write(self._key, encode_json(LockOwner(by=user_at_host(), at=utc_now())))
        delay = _POLL_SECONDS
        while (others := self._others()) and self._key < others[0] and not self._has_expired():
            time.sleep(delay)
            delay = min(2 * delay, _MAX_POLL_SECONDS)
        return others[0] if others else None

    def check(self, consequence: str) -> None:
        """Call before and after each write under the lock.

        Args:
            consequence: what that means for the write, as the start of the error message.

        Raises:
            StorageError: the lock is so old that others may soon ignore it.
        """
        if self._has_expired():
            raise StorageError(
                f"{consequence}: the lock {self._storage.url}/{self._key} is "
                f"{self._age().total_seconds():.0f} s old, and may be used for "
                f"{LOCK_STALE.total_seconds() / 2:.0f} s; the storage is slow or this machine was "
                "suspended: try again"
            )

    def warn_of_foreign_objects(self) -> None:
        """Name the objects in the folder that are no announcements."""
        for key in self._foreign:
            warn_of_foreign_object(self._storage, key)

    def release(self) -> None:
        """Withdraw the announcement. If that fails several times, it becomes stale."""
        failure = None
        for pause in _RELEASE_PAUSES:  # the lock would block this process's next write as well
            time.sleep(pause)
            try:
                self._storage.remove(self._key)
            except StorageError as error:
                failure = error
            else:
                return
        _logger.warning(
            "a released lock was not deleted, and blocks all writers for up to %d minutes: %s",
            LOCK_STALE.total_seconds() // 60, failure,
        )  # fmt: skip

    def _has_expired(self) -> bool:
        return self._age() > LOCK_STALE / 2

    def _age(self) -> timedelta:
        # As others see it. The monotonic clock stands still while the machine is suspended.
        return datetime.now(timezone.utc) - self._announced_at

    def _others(self) -> list[str]:
        """The keys of all other announcements, sorted. Deletes stale ones."""
        others: list[str] = []
        self._foreign = []
        for key, stored in sorted(self._storage.objects(self._folder).items()):
            announced_at = _time_of(key)
            if key == self._key:
                self._storage.check_clock(self._announced_at, stored.modified_at)
            elif announced_at is None:
                self._foreign.append(key)
            elif datetime.now(timezone.utc) - announced_at > LOCK_STALE:
                self._storage.remove(key)
            else:
                others.append(key)
        return others


@contextmanager
def locked(storage: Storage, folder: str) -> Iterator[StorageLock]:
    """Hold the lock of a folder, across machines, for the length of the block.

    Raises:
        StorageError: another process did not release the lock in time, and which; or the clocks
            of this machine and of the storage differ.
    """
    start, delay, is_logged = time.monotonic(), _POLL_SECONDS, False
    while True:
        lock = StorageLock(storage, folder)
        try:
            blocker = lock.acquire()
            if blocker is None:
                lock.warn_of_foreign_objects()
                yield lock
                return
        finally:
            lock.release()
        waited = time.monotonic() - start
        if waited > 1.5 * LOCK_STALE.total_seconds():
            raise StorageError(
                f"cannot lock {storage.url}/{folder} after {waited:.0f} s: it is held by "
                f"{_describe(storage, blocker)}; if no process writes there, a clock may "
                "be wrong: delete that object"
            )
        if waited > _LOG_AFTER_SECONDS and not is_logged:
            is_logged = True
            _logger.info("waiting for a lock held by %s", _describe(storage, blocker))
        time.sleep(random.uniform(0, delay))
        delay = min(2 * delay, _MAX_POLL_SECONDS)


def _describe(storage: Storage, key: str) -> str:
    owner = decode_json(storage.read(key) or b"", LockOwner)
    if owner is None:  # incomplete, or deleted
        return f"{storage.url}/{key}"
    return f"{owner.by} since {owner.at} ({storage.url}/{key})"


def _time_of(key: str) -> datetime | None:
    """The time in an announcement's key; None: the object is no announcement."""
    text = key.rpartition("/")[2].partition("-")[0]
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
    except ValueError:
        return None
