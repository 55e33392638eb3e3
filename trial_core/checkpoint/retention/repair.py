"""Stores damaged files of checkpoints again, from intact copies of their trial."""

from __future__ import annotations

import logging
import tempfile
import uuid as uuids
from collections.abc import Iterable
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.manifest import FileEntry, Manifest, utc_now
from trial_core.checkpoint.retention.deletion_markers import protect
from trial_core.checkpoint.retention.protections import Protection
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.verified_read import Damage, StoredFile, read_files

_logger = logging.getLogger(__name__)

_REASON = "`checkpoints verify --repair` stores its files; if it was killed, unpin the checkpoint"


def repair(store: CheckpointStore, manifest: Manifest, damage: Iterable[Damage]) -> list[Damage]:
    """Store a checkpoint's damaged files again; return the ones that stay damaged.

    The checkpoint is pinned meanwhile: a prune that meets the repair deletes neither the checkpoint
    nor a file that it lists. Raises as `protect`.
    """
    pin = Protection(
        uuid=manifest.uuid, by=user_at_host(), at=utc_now(), reason=_REASON,
        unique=uuids.uuid4().hex,
    )  # fmt: skip
    protect(store, manifest.name, pin.key, encode_json(pin))
    try:
        listed = store.list()
        return [
            each for each in damage if not _is_repaired(store, manifest.uuid, each.entry, listed)
        ]
    finally:
        store.storage.remove(pin.key)


def _is_repaired(
    store: CheckpointStore, uuid: str, entry: FileEntry, listed: Iterable[Manifest]
) -> bool:
    key, storage = entry.key(uuid), store.storage
    sources: dict[str, None] = {}
    trial = next((each.trial for each in listed if each.uuid == uuid), None)
    for each in listed:
        for copy in each.copies:
            is_equal = (copy.size_bytes, copy.digest) == (entry.size_bytes, entry.digest)
            if copy.key(each.uuid) != key:
                if is_equal and each.trial == trial:
                    sources[copy.key(each.uuid)] = None
            elif not is_equal or each.trial != trial:  # a hostile manifest may name any file
                _logger.warning("%s is not repaired: checkpoint %s lists it too", key, each.uuid)
                return False
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "file"
        for source in sources:
            if storage.is_linked(source):  # maybe to a file of this user's, which nothing may store
                continue
            differs: list[Damage] = []
            read_files(storage, [StoredFile(entry, source, target)], differs.append)
            if differs:
                continue
            storage.upload(target, key, CancelSignal())
            if store.find_damage(uuid, [entry]):
                return False
            storage.remove(layout.damage_key(*entry.place(uuid)))
            return True
    return False
