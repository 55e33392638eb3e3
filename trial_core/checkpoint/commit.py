"""Announcing and committing a checkpoint: the order of the reads and writes.

The manifest is written last, once and create-only, after all files that it lists are stored. During
a commit another attempt may take over the trial and sweep the files of this attempt::

    commit                                          take-over and sweep
    C1  adds the manifest's key to the intent       T1  takes the next number
    C2  checks the fence: fails if superseded       T2  reads the intents
    C3  checks that all files are stored            T3  for each with a manifest's key: writes a
    C4  creates the manifest                            tombstone under that key, create-only
    C5  unless still the newest: checks that all    T4  where that succeeded, or no key is there:
        files are stored; if not, deletes the           deletes the files, the tombstone, the
        manifest and fails                              intent; then looks for checkpoints to
                                                        resume from

Either C2 sees T1 and the commit fails; or C1 came before T1, and T2 reads the manifest's key. Then
C4 and T3 write the same key, create-only, and the first one decides. If C4 is first, the
checkpoint stays, and the new attempt may resume from it. If T3 is first, C4 fails while the
tombstone is there; after T4 the files are gone, which C5 finds. So no run resumes from a checkpoint
that is deleted later, and no checkpoint of the old attempt appears after the new one has looked.

Each rank stores at least one file itself, even if none has changed. So C5 finds a swept upload,
even if its manifest refers to older files. `references` covers files of earlier checkpoints.

Two cases are left: a driver that is killed between C4 and C5, after T4, leaves a manifest without
files; and so does a commit that is repeated after an error, while the checkpoint that it has
committed is being deleted. The checkpoint is listed, and a restore finds that it is damaged.
"""

from __future__ import annotations

import logging

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.intents import Intent, has_manifest, read_intent
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.verified_read import wrong_sizes
from trial_core.errors import CheckpointDamaged, CommitConflict, StorageError

_ANNOUNCE_TRIES = 20

_logger = logging.getLogger(__name__)


def announce_upload(
    storage: Storage, trial: str, uuid: str, writer: str, fence: Fence | None, base: str
) -> None:
    """Implements `CheckpointStore.announce_upload`."""
    intent = _new_intent(trial, uuid, writer, fence, base)
    for _ in range(_ANNOUNCE_TRIES):
        try:
            storage.create(intent.key, encode_json(intent))
            break
        except FileExistsError:
            # The intent of an earlier try stays, unless it has just been swept: it may name the
            # manifest's key.
            if (earlier := read_intent(storage, trial, uuid)) is not None:
                if earlier.base != base:
                    renewed = msgspec.structs.replace(earlier, base=base)
                    storage.write(intent.key, encode_json(renewed))
                break
    else:
        raise CommitConflict(
            f"checkpoint {uuid} is not uploaded: its intent, {storage.url}/{intent.key}, was "
            f"written and deleted by others {_ANNOUNCE_TRIES} times; let only one run train trial "
            f"{trial}"
        )
    if fence is not None:  # after the intent is written: a later take-over then finds it
        fence.check(f"checkpoint {uuid} is not uploaded")


def commit(storage: Storage, manifest: Manifest, fence: Fence | None, base: str) -> None:
    """Implements `CheckpointStore.commit`."""
    data, uuid = manifest.to_json(), manifest.uuid
    # A manifest that readers would refuse must not be committed.
    Manifest.from_json(data, f"the manifest of checkpoint {uuid}")
    batches = manifest.progress.batches_trained
    intent = _new_intent(manifest.trial, uuid, manifest.writer, fence, base, batches)
    storage.write(intent.key, encode_json(intent))
    if fence is not None:
        fence.check(_not_committed(manifest))
    if damage := wrong_sizes(storage, uuid, manifest.all_files):
        missing = damage[0]
        if fence is not None:  # the files may have just been swept
            fence.check(_not_committed(manifest))
        place = f"in {storage.url}/{layout.CHECKPOINTS}/{'/'.join(missing.entry.place(uuid))}"
        if missing.entry.stored_at:  # a retry stores it anew
            raise StorageError(f"{_not_committed(manifest)}: {missing}, {place}")
        raise CheckpointDamaged(
            f"{_not_committed(manifest)}: {missing}, {place}; upload it before committing"
        )
    try:
        storage.create(manifest.name.key, data)
    except FileExistsError as error:
        if not has_manifest(storage, manifest.name.key):
            raise _swept_error(storage, manifest, fence) from error
        storage.remove(intent.key)  # the checkpoint is committed, by some attempt
        raise CommitConflict(
            f"checkpoint {uuid} of trial {manifest.trial} is already committed, by another writer "
            f"than {manifest.writer} or with another manifest ({storage.url}/{manifest.name.key}): "
            "two runs may be training this trial; let only one of them continue"
        ) from error
    is_fenced = fence is not None and fence.is_newest()
    if not is_fenced and wrong_sizes(storage, uuid, manifest.all_files):
        storage.remove(manifest.name.key)
        raise _swept_error(storage, manifest, fence)
    _tidy(storage, intent)


def _new_intent(
    trial: str, uuid: str, writer: str, fence: Fence | None, base: str, batches: int | None = None
) -> Intent:
    return Intent(
        trial=trial, uuid=uuid, writer=writer, created_at=utc_now(),
        number=fence.number if fence is not None else 0, batches=batches, base=base,
    )  # fmt: skip


def _tidy(storage: Storage, intent: Intent) -> None:
    """Delete a committed checkpoint's intent, and partial uploads that retries have left."""
    try:
        storage.abort_uploads(layout.files_folder(intent.uuid))
        storage.remove(intent.key)
    except StorageError as error:
        _logger.warning(
            "checkpoint %s is committed, but leftovers of its upload stay until trial %s runs "
            "again: %s",
            intent.uuid, intent.trial, error,
        )  # fmt: skip


def _not_committed(manifest: Manifest) -> str:
    return f"checkpoint {manifest.uuid} is not committed"


def _swept_error(
    storage: Storage, manifest: Manifest, fence: Fence | None
) -> CommitConflict | StorageError:
    if fence is not None:
        return fence.refusal(f"{_not_committed(manifest)}, and its uploaded files are deleted")
    return CommitConflict(
        f"{_not_committed(manifest)}: another run of trial {manifest.trial} has started since, and "
        f"has deleted what {manifest.writer} had uploaded to "
        f"{storage.url}/{layout.files_folder(manifest.uuid)}; let only one of them continue"
    )
