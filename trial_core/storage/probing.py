"""Trying a storage out: whether it gives back what was written, and whether it keeps a condition.

Every S3 server says that it has stored an object. Not every one looks at the condition that it
should store it only where there is none: older ones write over what is there.
"""

from __future__ import annotations

import uuid as uuids
from typing import TYPE_CHECKING, Any

from trial_core.checkpoint import layout
from trial_core.errors import StorageError

if TYPE_CHECKING:
    from trial_core.storage.base import Storage

_SEND_CONDITIONS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols whose file systems have the server decide, not the client."""

# A server that is overloaded refuses as well, once; and what it said does not tell: of servers that
# speak S3 each has another way to say that a key is taken.
_PROBES = 3


def sends_conditions(fs: Any) -> bool:
    """Whether a file system of fsspec's sends the condition along with the write."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _SEND_CONDITIONS.isdisjoint(protocols)


def keeps_what_is_there(storage: Storage) -> bool:
    """Create an object, and again with other bytes: whether the first ones stay.

    Raises:
        StorageError: the storage failed.
    """
    key = f"{layout.PROBES}/{uuids.uuid4()}"
    storage.create(key, b"first")
    try:
        return all(_is_refused(storage, key) for _ in range(_PROBES))
    finally:
        storage.remove(key)


def _is_refused(storage: Storage, key: str) -> bool:
    try:
        storage.create(key, b"second")
    except FileExistsError:
        return True
    return False


def read_back(storage: Storage, key: str, data: bytes) -> None:
    """Compare what is there with what was written.

    Raises:
        StorageError: it is something else.
    """
    seen = storage.read(key)
    if seen != data:
        raise StorageError(
            f"{storage.url} does not give back what was written to it ({key}: wrote {data!r}, read "
            f"{seen!r}): it cannot hold checkpoints"
        )
