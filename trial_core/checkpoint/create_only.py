"""Create-only writes on every storage.

The keys that several writers may create at once are attempts, manifests (and tombstones under their
keys), journals, and the registry's versions and moves. On a storage without conditional writes the
writer takes a lock, looks, then writes; see `storage_lock`. An intent needs no lock: it has one
writer.
"""

from __future__ import annotations

from trial_core.checkpoint.manifest import is_json
from trial_core.checkpoint.storage_lock import locked
from trial_core.storage.base import Storage

CLOCKS_ADVICE = "keep the clocks of all machines that use it correct to a few minutes"
"""What a person has to do about a storage without conditional writes."""


def create_only(storage: Storage, key: str, data: bytes, lock_folder: str) -> None:
    """Create a small JSON object. If several writers create the same key, one succeeds.

    Succeeds if the object exists with the same bytes. After an error it may have been stored:
    create it again to find out.

    Args:
        lock_folder: key prefix of the lock, the same for all writers of the key.

    Raises:
        FileExistsError: the object exists with other bytes.
        StorageError: the storage failed, or the lock was not free in time.
    """
    if storage.has_conditional_writes():
        storage.create(key, data)
        return
    with locked(storage, lock_folder) as lock:
        existing = storage.read(key)
        if existing == data:
            return
        if existing is not None and is_json(existing):
            raise FileExistsError(f"{key} exists in {storage.url}")
        lock.check(f"{key} is not written")
        if existing is not None:  # incomplete, and its writer no longer has the lock
            storage.remove(key)
        storage.create(key, data)
        # A write that took so long may have replaced that of the lock's next owner.
        lock.check(f"{key} may be written, too late")
