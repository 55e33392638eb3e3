"""Deletion markers: a prune announces in the storage which checkpoint it deletes.

A prune and a process that needs the checkpoint may meet. The prune first writes its marker, then
looks for pins, holds and claims. The other process first writes its pin, hold or claim, then looks
for markers (`protect`). So at least one of them sees the other and gives way. Each prune has a
separate key, so a prune that gives way does not remove the marker of another one that deletes.

Others ignore a marker after `STALE_AFTER`. A prune therefore deletes nothing if its search has
taken half of that time, for example because its machine was suspended.

The marker holds the manifest, so the next prune can finish an interrupted deletion.
"""

from __future__ import annotations

import logging
import time
import uuid as uuids
from collections.abc import Callable
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import (
    age_of,
    encode_json,
    named_keys,
    read_json,
    user_at_host,
)
from trial_core.checkpoint.manifest import Manifest, Timestamp, utc_now
from trial_core.checkpoint.storage.base import DeletedFiles
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, CommitConflict

STALE_AFTER = timedelta(hours=1)
"""After this time without an end, the pruner that wrote the marker is presumed dead."""

_logger = logging.getLogger(__name__)


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The marker of a deletion: by whom (``user@host``), since when, and the stored manifest."""

    by: str
    at: Timestamp
    manifest: str


def delete_unless(
    store: CheckpointStore, manifest: Manifest, why_needed: Callable[[], str | None]
) -> DeletedFiles | str:
    """Announce a deletion, look whether the checkpoint is needed, and delete it if it is not.
    Returns the deleted files, or why the checkpoint stays."""
    began_seconds, limit_seconds = _seconds(), STALE_AFTER.total_seconds() / 2
    key = mark_deletion(store, manifest)
    reason = why_needed()
    if reason is None and _seconds() - began_seconds >= limit_seconds:
        reason = (
            f"the search for pins, holds and claims took longer than {limit_seconds / 60:.0f} "
            "minutes: the storage is slow, or this machine was suspended; the next prune tries "
            "again"
        )
    if reason is not None:
        store.storage.remove(key)
        return reason
    deleted = store.delete(manifest)
    unmark_deleted(store, manifest.uuid)
    return deleted


def mark_deletion(store: CheckpointStore, manifest: Manifest) -> str:
    """Announce that a checkpoint is about to be deleted; return the marker's key."""
    marker = Deletion(by=user_at_host(), at=utc_now(), manifest=manifest.to_json().decode())
    key = layout.deletion_key(manifest.uuid, uuids.uuid4().hex)
    store.storage.write(key, encode_json(marker))
    return key


def unmark_deleted(store: CheckpointStore, uuid: str) -> None:
    """Delete all markers of a deleted checkpoint, also of interrupted prunes."""
    for key in _marker_keys(store, uuid):
        store.storage.remove(key)


def protect(store: CheckpointStore, name: layout.ManifestName, key: str, data: bytes) -> None:
    """Write an object that protects a checkpoint. Afterwards the checkpoint is there, and stays.

    Raises CheckpointNotFound if it is not there, CommitConflict if it is being deleted: the object
    is removed then, unless it has replaced an earlier one. After a StorageError it may be written.
    """
    existed = store.storage.exists(key)
    store.storage.write(key, data)
    try:
        check_stays(store, name)
    except (CheckpointNotFound, CommitConflict):
        if not existed and store.storage.read(key) == data:
            store.storage.remove(key)
        raise


def finish_deletions(store: CheckpointStore) -> list[Manifest]:
    """Delete the files of checkpoints whose deletion was interrupted; return those checkpoints. If
    the manifest is still there, the checkpoint is not deleted; its markers go once they are
    stale."""
    finished: dict[str, Manifest] = {}
    for key, uuid in named_keys(store.storage, layout.DELETIONS, layout.parse_deletion_key):
        deletion = read_json(store.storage, key, Deletion)
        manifest = _manifest_of(store, key, uuid, deletion) if deletion is not None else None
        if deletion is not None and manifest is None:
            continue
        if manifest is not None and not _is_committed(store, manifest):
            try:
                store.delete(manifest)
            except CheckpointDamaged as error:
                _logger.warning("a deletion is not finished: %s", error)
                continue
            finished[manifest.uuid] = manifest
        elif not _is_stale(store, key, deletion):
            continue  # another prune is deleting it
        store.storage.remove(key)
    return list(finished.values())


def check_stays(store: CheckpointStore, name: layout.ManifestName) -> None:
    """Check that a checkpoint that has just been protected stays. Raises as `protect`."""
    for key in _marker_keys(store, name.uuid):
        deletion = read_json(store.storage, key, Deletion)
        if deletion is not None and not _is_stale(store, key, deletion):
            raise CommitConflict(
                f"checkpoint {name.uuid} is being deleted, by {deletion.by} since {deletion.at}; "
                "try again in case it is still there afterwards"
            )
    if not store.storage.exists(name.key):
        raise CheckpointNotFound(f"checkpoint {name.uuid} has just been deleted")


def _marker_keys(store: CheckpointStore, uuid: str) -> list[str]:
    folder = layout.deletions_folder(uuid)
    return [key for key, _ in named_keys(store.storage, folder, layout.parse_deletion_key)]


def _manifest_of(
    store: CheckpointStore, key: str, uuid: str, deletion: Deletion
) -> Manifest | None:
    """The manifest in a checkpoint's marker; None, with a warning, if it is of another one."""
    where = f"{store.url}/{key}"
    try:
        manifest = Manifest.from_json(deletion.manifest.encode(), where)
    except CheckpointError as error:
        _logger.warning("a deletion is not finished, files may be left: %s", error)
        return None
    if manifest.uuid != uuid:
        _logger.warning(
            "the deletion marker %s is ignored: it names checkpoint %s; delete it",
            where, manifest.uuid,
        )  # fmt: skip
        return None
    return manifest


def _seconds() -> float:
    """A clock that is never set. Where the system has such a clock, it counts suspended time."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _is_committed(store: CheckpointStore, manifest: Manifest) -> bool:
    """Return whether the checkpoint has a manifest, under the marker's key or another one."""
    if store.storage.exists(manifest.name.key):
        return True
    names = map(layout.parse_manifest_key, store.storage.sizes(layout.MANIFESTS))
    return any(name is not None and name.uuid == manifest.uuid for name in names)


def _is_stale(store: CheckpointStore, key: str, deletion: Deletion | None) -> bool:
    """Return whether a marker's prune is presumed dead, by the storage's own clock; if that tells
    no times, by the marker's time and this machine's clock. A marker with an unreadable time is
    stale then."""
    stored = store.storage.objects(key.rpartition("/")[0]).get(key)
    if stored is None:
        return True  # it has just been deleted
    now = store.storage.now()
    if now is not None and stored.modified_at is not None:
        return now - stored.modified_at > STALE_AFTER
    age = age_of(deletion.at) if deletion is not None else None
    return age is None or age > STALE_AFTER
