"""Deletion markers: a pruner announces in the storage which checkpoint it deletes.

    deletions/{uuid}.json     who deletes the checkpoint, since when, and its manifest

A pruner and a person may meet: one deletes a checkpoint, the other pins it. The pruner first writes
the marker, then looks for pins and holds. The other process first writes its pin or hold, then
looks for a marker (`check_not_deleted`). So at least one of them sees the other and gives way.

The marker holds the manifest, so the next prune can finish an interrupted deletion.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_json, encode_json, is_older, user_at_host
from trial_core.checkpoint.manifest import Manifest, Timestamp, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, CheckpointNotFound, CommitConflict

STALE_AFTER = timedelta(hours=1)
"""After this time without an end, the pruner that wrote the marker is presumed dead."""

_logger = logging.getLogger(__name__)


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The marker that a checkpoint is being deleted.

    Attributes:
        by: user and machine of the pruner: ``user@host``.
        at: start of the deletion: ISO 8601, UTC.
        manifest: the checkpoint's manifest as it was stored.
    """

    by: str
    at: Timestamp
    manifest: str


def mark_deletion(store: CheckpointStore, manifest: Manifest) -> None:
    """Announce that a checkpoint is about to be deleted."""
    marker = Deletion(by=user_at_host(), at=utc_now(), manifest=manifest.to_json().decode())
    store.storage.write(layout.deletion_key(manifest.uuid), encode_json(marker))


def unmark_deletion(store: CheckpointStore, uuid: str) -> None:
    """Delete the marker: the checkpoint is deleted, or stays."""
    store.storage.remove(layout.deletion_key(uuid))


def check_not_deleted(store: CheckpointStore, name: layout.ManifestName) -> None:
    """Check that a checkpoint that has just been pinned or held is still there, and stays.

    Raises:
        CheckpointNotFound: it is not there.
        CommitConflict: it is being deleted.
    """
    deletion = _read_deletion(store, name.uuid)
    if deletion is not None and not is_older(deletion.at, STALE_AFTER):
        raise CommitConflict(
            f"checkpoint {name.uuid} is being deleted, by {deletion.by} since {deletion.at}; try "
            "again in case it is still there afterwards"
        )
    if store.storage.read(name.key) is None:
        raise CheckpointNotFound(f"checkpoint {name.uuid} has just been deleted")


def finish_deletions(store: CheckpointStore) -> list[Manifest]:
    """Delete the files of checkpoints whose deletion was interrupted; return those checkpoints.

    A checkpoint whose manifest is still there is not deleted; its marker goes once it is stale.
    """
    finished = []
    for key in sorted(store.storage.sizes(layout.DELETIONS)):
        uuid = key.removeprefix(f"{layout.DELETIONS}/").removesuffix(".json")
        if not layout.is_uuid(uuid):
            continue
        deletion = _read_deletion(store, uuid)
        if deletion is not None:
            try:
                manifest = Manifest.from_json(deletion.manifest.encode(), f"{store.url}/{key}")
            except CheckpointError as error:
                _logger.warning("a deletion is not finished, files may be left: %s", error)
                continue
            if store.storage.read(manifest.name.key) is None:
                store.delete(manifest)
                finished.append(manifest)
            elif not is_older(deletion.at, STALE_AFTER):
                continue  # another pruner is deleting it
        store.storage.remove(key)
    return finished


def _read_deletion(store: CheckpointStore, uuid: str) -> Deletion | None:
    """A checkpoint's marker; None if there is none, or half of one."""
    data = store.storage.read(layout.deletion_key(uuid))
    # The pruner of half a marker was killed before it deleted anything.
    return decode_json(data, Deletion) if data is not None else None
