"""Beginning and committing a checkpoint: in which order what is written and looked at.

The manifest is written last, once and create-only, after every file it lists is there. What a
sweep of the same trial has to do with it is told in `intents`.
"""

from __future__ import annotations

import logging

from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import Intent, as_object, read_intent
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.storage import Storage
from trial_core.errors import CheckpointDamaged, CommitConflict, StorageError

_logger = logging.getLogger(__name__)


def begin(storage: Storage, trial: str, uuid: str, attempt: str) -> None:
    """See `CheckpointStore.begin`."""
    intent = Intent(trial=trial, uuid=uuid, attempt=attempt, created_at=utc_now())
    try:
        storage.create(intent.key, as_object(intent))
    except FileExistsError:  # of an earlier try; not to be replaced if it was swept since
        there = read_intent(storage, trial, uuid)
        if there is not None and there.swept_at is not None:
            raise _was_swept(storage, there) from None


def commit(storage: Storage, manifest: Manifest) -> None:
    """See `CheckpointStore.commit`."""
    data = manifest.to_json()
    # What readers would refuse must not be committed.
    Manifest.from_json(data, f"the manifest of checkpoint {manifest.uuid}")
    begun = read_intent(storage, manifest.trial, manifest.uuid)
    if begun is not None and begun.swept_at is not None:
        raise _was_swept(storage, begun)
    if (missing := _first_missing(storage, manifest)) is not None:
        raise CheckpointDamaged(f"checkpoint {manifest.uuid} is not committed: {missing}")
    try:
        storage.create(manifest.name.key, data)
    except FileExistsError as error:
        raise CommitConflict(
            f"checkpoint {manifest.uuid} of trial {manifest.trial} is committed already, by "
            f"another writer than {manifest.attempt} or with another manifest "
            f"({storage.url}/{manifest.name.key}): two runs may be writing this trial; let only "
            "one of them go on"
        ) from error
    if begun is not None:
        _confirm(storage, manifest, begun)
        _tidy(storage, begun)


def _confirm(storage: Storage, manifest: Manifest, begun: Intent) -> None:
    """Take a commit back if a sweep came between."""
    now = read_intent(storage, manifest.trial, manifest.uuid)
    if now == begun:
        return
    if now is None and _first_missing(storage, manifest) is None:
        return  # the sweep is over, and has spared it
    storage.remove(manifest.name.key)
    # For the next sweep: this one may have missed a file.
    storage.write(begun.key, as_object(begun))
    raise _was_swept(storage, begun)


def _tidy(storage: Storage, begun: Intent) -> None:
    """Drop what retries may have left beside a committed checkpoint's files, and its intent."""
    try:
        storage.end_uploads(layout.files_folder(begun.uuid))
        storage.remove(begun.key)
    except StorageError as error:
        _logger.warning("left until trial %s runs again: %s", begun.trial, error)


def _was_swept(storage: Storage, intent: Intent) -> CommitConflict:
    return CommitConflict(
        f"checkpoint {intent.uuid} is not committed: another run of trial {intent.trial} has begun "
        f"since, and deleted what {intent.attempt} had uploaded of it to "
        f"{storage.url}/{layout.files_folder(intent.uuid)}; let only one of them go on"
    )


def _first_missing(storage: Storage, manifest: Manifest) -> str | None:
    """What is wrong with the first file that is not stored whole."""
    folder = layout.files_folder(manifest.uuid)
    there = storage.sizes(folder)
    for file in manifest.files:
        seen = there.get(layout.file_key(manifest.uuid, file.path))
        if seen != file.size_bytes:
            return (
                f"{file.path}, written by rank {file.rank}, "
                f"{'is missing' if seen is None else f'has {seen} bytes'} in "
                f"{storage.url}/{folder}, and {file.size_bytes} bytes were expected; upload it "
                "before committing"
            )
    return None
