"""Beginning and committing a checkpoint: in which order what is written and looked at.

The manifest is written last, once and create-only, after every file it lists is there. Meanwhile
another attempt may take the trial over and sweep away what this one has begun::

    who commits                                     who takes over
    C1  says as what, in its intent                 T1  takes its number
    C2  looks for a later number; gives up          T2  looks for intents
    C3  looks whether all files are there           T3  for those that say as what: writes a void
    C4  writes the manifest, if nothing is there        in the manifest's place, if nothing is there
    C5  where there is a later number: looks        T4  deletes the files of those that had none,
        again whether all files are there,              the void, the intent; then looks for the
        and takes the manifest back if not              checkpoints to go on from

Either C2 sees T1, or it came before; then T2 sees C1, and one of C4 and T3 comes first, and
decides. If it is C4, the checkpoint stays, and who takes over may go on from it. If it is T3, it is
none: as long as the void is there C4 fails; once it is gone, so are the files, and C5 finds that.
So nobody goes on from a checkpoint that is taken back, and none appears once another attempt has
looked for those that it may go on from. (Who is killed between C4 and C5, after T4, leaves a
manifest without files: listed, and found damaged by whoever would restore it.)
"""

from __future__ import annotations

import logging

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.intents import Intent, read_intent
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import Manifest, is_void, utc_now
from trial_core.errors import CheckpointDamaged, CommitConflict, StorageError
from trial_core.storage.base import Storage

_TRIES = 20

_logger = logging.getLogger(__name__)


def announce_upload(
    storage: Storage, trial: str, uuid: str, attempt: str, fence: Fence | None
) -> None:
    """See `CheckpointStore.announce_upload`."""
    number = fence.number if fence is not None else 0
    intent = Intent(trial=trial, uuid=uuid, attempt=attempt, created_at=utc_now(), number=number)
    for _ in range(_TRIES):
        try:
            storage.create(intent.key, encode_json(intent))
            break
        except FileExistsError:
            # Of an earlier try, which stays as it is; unless it has just been swept.
            if read_intent(storage, trial, uuid) is not None:
                break
    else:
        raise CommitConflict(
            f"checkpoint {uuid} is not uploaded: {storage.url}/{intent.key} comes and goes; let "
            f"only one run train trial {trial}"
        )
    if fence is not None:  # after the intent: who takes over from now on finds it
        fence.check(f"checkpoint {uuid} is not uploaded")


def commit(storage: Storage, manifest: Manifest, fence: Fence | None) -> None:
    """See `CheckpointStore.commit`."""
    data = manifest.to_json()
    # What readers would refuse must not be committed.
    Manifest.from_json(data, f"the manifest of checkpoint {manifest.uuid}")
    intent = _announce(storage, manifest, fence)
    if fence is not None:
        fence.check(_not_committed(manifest))
    if (missing := _first_missing(storage, manifest)) is not None:
        if fence is not None:  # they may have been swept just now
            fence.check(_not_committed(manifest))
        raise CheckpointDamaged(f"{_not_committed(manifest)}: {missing}")
    try:
        storage.create(manifest.name.key, data)
    except FileExistsError as error:
        raise _refused(storage, manifest, fence, intent) from error
    if (fence is None or not fence.is_last()) and _first_missing(storage, manifest) is not None:
        storage.remove(manifest.name.key)
        raise _was_swept(storage, manifest, fence)
    _tidy(storage, intent)


def _announce(storage: Storage, manifest: Manifest, fence: Fence | None) -> Intent:
    """Say in the intent as what the checkpoint is about to be committed."""
    intent = Intent(
        trial=manifest.trial,
        uuid=manifest.uuid,
        attempt=manifest.attempt,
        created_at=utc_now(),
        number=fence.number if fence is not None else 0,
        batches=manifest.progress.batches_trained,
    )
    storage.write(intent.key, encode_json(intent))
    return intent


def _tidy(storage: Storage, intent: Intent) -> None:
    """Drop what retries may have left beside a committed checkpoint's files, and its intent."""
    try:
        storage.end_uploads(layout.files_folder(intent.uuid))
        storage.remove(intent.key)
    except StorageError as error:
        _logger.warning("left until trial %s runs again: %s", intent.trial, error)


def _not_committed(manifest: Manifest) -> str:
    return f"checkpoint {manifest.uuid} is not committed"


def _refused(
    storage: Storage, manifest: Manifest, fence: Fence | None, intent: Intent
) -> CommitConflict:
    """Why the manifest cannot be written."""
    there = storage.read(manifest.name.key)
    if there is None or is_void(there):
        return _was_swept(storage, manifest, fence)
    storage.remove(intent.key)  # it is committed, whoever did it
    return CommitConflict(
        f"checkpoint {manifest.uuid} of trial {manifest.trial} is committed already, by "
        f"another writer than {manifest.attempt} or with another manifest "
        f"({storage.url}/{manifest.name.key}): two runs may be writing this trial; let only "
        "one of them go on"
    )


def _was_swept(storage: Storage, manifest: Manifest, fence: Fence | None) -> CommitConflict:
    if fence is not None:
        return fence.superseded(f"{_not_committed(manifest)}, and what was uploaded is deleted")
    return CommitConflict(
        f"{_not_committed(manifest)}: another run of trial {manifest.trial} has begun since, and "
        f"deleted what {manifest.attempt} had uploaded of it to "
        f"{storage.url}/{layout.files_folder(manifest.uuid)}; let only one of them go on"
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
