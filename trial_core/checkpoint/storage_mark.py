"""The mark of a storage: an object at its root with a random id, written once.

A folder whose file system is not mounted looks like an empty storage. So a run reads the mark when
it begins, and compares it before it commits. It is `layout.MARK`.

If only the mark is lost, records in the storage identify it too, and the mark is written again.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_json, encode_json, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.storage.base import Storage
from trial_core.errors import StorageError

ANOTHER_STORAGE = (
    "Is it not mounted on this machine any more, or was it replaced? Mount it, or name the right "
    "one (checkpoint_storage), and start the run again"
)
"""What to do if a storage is not the one that a run began with."""


class StorageMark(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a mark: a random id, and which run wrote it (``user@host``) when."""

    id: str
    by: str
    at: str


def read_mark(storage: Storage) -> str | None:
    """The id of the storage's mark; None if it has none. One small request."""
    data = storage.read(layout.MARK)
    if data is None:
        return None
    mark = decode_json(data, StorageMark)
    if mark is None:
        raise StorageError(
            f"{storage.url}/{layout.MARK} is not the mark of a storage: it was altered, or is not "
            "trialflow's. Restore it, or delete it: the runs in this storage write it again"
        )
    return mark.id


def marked(
    storage: Storage, expected: str | None = None, is_recorded: Callable[[], bool] = lambda: False
) -> str:
    """The id of the storage's mark, which is written if there is none.

    Raises StorageError if the mark is another one than `expected`, or is missing, and `is_recorded`
    returns False: the storage has no record that the caller began there. With a record it is the
    right one, even if its mark is lost or was replaced. Also if the mark cannot be read.
    """
    mark = read_mark(storage)
    if expected is not None and mark != expected and not is_recorded():
        raise StorageError(
            f"{storage.url} is not the storage with which the run began: {described(mark)}, "
            f"expected {expected}, and no record of the run is there. {ANOTHER_STORAGE}. If that "
            "storage is lost, start a new run"
        )
    if mark is not None:
        return mark
    new = StorageMark(id=expected or uuids.uuid4().hex, by=user_at_host(), at=utc_now())
    try:
        storage.create(layout.MARK, encode_json(new))
    except FileExistsError:  # another run has just written it
        return marked(storage)
    return new.id


def described(mark: str | None) -> str:
    return f"it has no {layout.MARK}" if mark is None else f"its mark is {mark}"
