"""Deletes code archives that no checkpoint names any more.

`checkpoint.code_objects` describes what happens when a deletion and an upload meet.

A prune may delete the last checkpoint that names an archive. A run that is killed before its first
commit leaves an archive that no checkpoint names. An upload names its archive in its intent until
the manifest is there, so intents are read before manifests. One that cannot be read may name any
archive: then all stay.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Iterable

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import read_intent
from trial_core.checkpoint.json_objects import named_keys
from trial_core.checkpoint.manifest import Manifest, StoredCode, is_tombstone
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError
from trial_core.storage.parallel import CancelSignal, in_parallel

_READ_THREADS = 8

_logger = logging.getLogger(__name__)


def delete_unneeded_code(store: CheckpointStore, codes: Iterable[StoredCode]) -> list[str]:
    """Delete those of the stored archives that nothing names; return their keys.

    May be repeated after an error. Several processes may delete at the same time.

    Raises:
        StorageError: the storage failed. Archives that are left over may be deleted later.
    """
    return _delete_unneeded(store, {code.key: (code.digest, code.number) for code in codes})


def sweep_unneeded_code(store: CheckpointStore) -> list[str]:
    """Delete all stored archives that nothing names; return their keys. Raises as above."""
    found = named_keys(store.storage, layout.CODE, layout.parse_code_key)
    return _delete_unneeded(
        store, {key: (name.digest, name.number) for key, name in found if not name.is_marker}
    )


def _delete_unneeded(store: CheckpointStore, codes: dict[str, tuple[str, int]]) -> list[str]:
    if not codes:
        return []
    # First without markers: an upload that meets a marker stores its code a second time.
    named = _named_archives(store)
    codes = {key: codes[key] for key in codes if named is not None and key not in named}
    if not codes:
        return []
    markers = {}
    for key, (digest, number) in codes.items():
        markers[key] = layout.code_deletion_key(digest, number, uuids.uuid4().hex)
        store.storage.write(markers[key], b"{}\n")
    named = _named_archives(store)  # after the markers are written
    deleted = [key for key in codes if named is not None and key not in named]
    for key in deleted:
        # If this fails, the marker stays: the deletion may still happen.
        store.storage.remove(key)
        _logger.info("deleted the code %s/%s: no checkpoint names it", store.url, key)
    for marker in markers.values():
        store.storage.remove(marker)
    return deleted


def _named_archives(store: CheckpointStore) -> set[str] | None:
    """The keys of all archives that an upload or a checkpoint names; None: it cannot be told."""
    named = set()
    for _, name in named_keys(store.storage, layout.UPLOADS, layout.parse_intent_key):
        intent = read_intent(store.storage, *name)
        if intent is not None and not intent.attempt:
            return None  # unreadable, and a warning has said so
        if intent is not None and intent.code is not None:
            named.add(intent.code.key)
    committed = named_keys(store.storage, layout.MANIFESTS, layout.parse_manifest_key)

    def read(key: str, stop: CancelSignal) -> StoredCode | None:
        stop.check()
        data = store.storage.read(key)
        if data is None or is_tombstone(data):
            return None
        return Manifest.from_json(data, f"{store.url}/{key}").code

    try:
        codes = in_parallel(read, [key for key, _ in committed], _READ_THREADS)
    except StorageError:
        raise
    except CheckpointError as error:
        _logger.warning("no code is deleted, because a checkpoint may name it: %s", error)
        return None
    return named | {code.key for code in codes if code is not None}
