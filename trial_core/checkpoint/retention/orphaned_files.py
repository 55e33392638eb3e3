"""Orphaned files: a checkpoint's files that have neither an intent nor a manifest.

A sweep deletes the intent of a superseded attempt. That attempt may upload until its ranks are
ended, and no later sweep finds these files: nothing says which trial they belong to.

Files of an upload in progress are never orphaned. Its intent is written before its first byte, and
is deleted only when the manifest is there. So this module lists the files first, then the intents,
then the manifests. A file whose checkpoint was deleted is not orphaned while another one refers to
it. Orphaned files are also old by the storage's own clock, no protection or claim names their
checkpoint, and no key of an intent or a manifest contains its uuid, readable or not.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Sequence
from datetime import datetime, timedelta

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import SweptUpload
from trial_core.checkpoint.json_objects import warn_of_foreign_object
from trial_core.checkpoint.references import why_unknown
from trial_core.checkpoint.retention.claims import claims
from trial_core.checkpoint.retention.protections import protected
from trial_core.checkpoint.storage.base import StoredObject
from trial_core.checkpoint.store import CheckpointStore

_logger = logging.getLogger(__name__)


Orphaned = dict[str, tuple[datetime, list[StoredObject]]]
"""Orphaned files by the checkpoint's uuid, unfinished uploads included; and when the last one was
written, by the storage's clock."""


def sweep_orphaned_files(store: CheckpointStore, uuid: str, age: timedelta) -> SweptUpload | None:
    """Delete a checkpoint's files if they are still orphaned; None if they are not, or are gone."""
    if not find_orphaned_files(store, age, layout.files_folder(uuid)):
        return None
    keep = store.references().keys
    return SweptUpload(uuid, None, *store.storage.clear(layout.files_folder(uuid), keep))


def find_orphaned_files(
    store: CheckpointStore, age: timedelta, folder: str = layout.CHECKPOINTS
) -> Orphaned:
    """The orphaned files below a folder that are older than `age`. Changes nothing."""
    by_uuid: dict[str, list[tuple[str, StoredObject]]] = {}
    stored = [  # first, see above
        *store.storage.unfinished_uploads(folder),
        *store.storage.objects(folder).items(),
    ]
    for key, file in stored:
        by_uuid.setdefault(key.split("/")[1], []).append((key, file))
    announced = "\n".join(store.storage.sizes(layout.UPLOADS))
    committed = "\n".join(store.storage.sizes(layout.MANIFESTS))
    unnamed = [uuid for uuid in by_uuid if uuid not in announced and uuid not in committed]
    for name in sorted(each for each in unnamed if not _is_uuid(each)):
        warn_of_foreign_object(store.storage, f"{layout.CHECKPOINTS}/{name}")
    if not any(map(_is_uuid, unnamed)):
        return {}
    references = store.references()
    if (why := why_unknown(store.storage, references)) is not None:
        _logger.warning("orphaned files stay: %s", why)
        return {}
    orphaned = {
        uuid: files
        for uuid in unnamed
        if _is_uuid(uuid)
        and (files := [file for key, file in by_uuid[uuid] if key not in references.keys])
    }
    now = store.storage.now()
    needed = [prefix for claim in claims(store) for prefix in claim.needs if prefix]
    found: Orphaned = {}
    for uuid, files in orphaned.items():
        modified_at = _last_modified(files)
        if now is None or modified_at is None:
            _logger.warning(
                "%s has neither a manifest nor an intent, and stays: the storage does not tell how "
                "old it is; delete it if no run uploads it",
                store.files_url(uuid),
            )
        elif (
            now - modified_at > age
            and not any(uuid.startswith(prefix) for prefix in needed)
            and not protected(store, uuid)
        ):
            found[uuid] = modified_at, files
    return found


def _last_modified(files: Sequence[StoredObject]) -> datetime | None:
    """When the last of the files was written; None if one of the times is not known."""
    times = [file.modified_at for file in files if file.modified_at is not None]
    return max(times) if len(times) == len(files) else None


def _is_uuid(text: str) -> bool:
    """Return whether a folder's name is a uuid, as a checkpoint's is."""
    try:
        return str(uuids.UUID(text)) == text
    except ValueError:
        return False
