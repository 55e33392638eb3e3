"""Intents: objects that announce an upload before its first byte; and the sweep of leftovers.

A trial's next run finds the leftovers of a killed run by their intents. Without an intent, half a
checkpoint of one trial looks like an upload of another trial in progress. `retention.leftovers`
sweeps trials that never run again.

See `fencing` for two attempts at one trial, and `commit` for a commit that meets a sweep.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.create_only import create_only
from trial_core.checkpoint.json_objects import decode_json, named_keys
from trial_core.checkpoint.manifest import (
    Count,
    StoredCode,
    is_json,
    is_tombstone,
    tombstone,
)
from trial_core.storage.base import Storage


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement that a checkpoint is being uploaded.

    Attributes:
        trial: the trial's id.
        uuid: the checkpoint's.
        attempt: `Manifest.attempt` of the checkpoint; empty if the intent is unreadable.
        created_at: start of the upload: ISO 8601, UTC; empty if the intent is unreadable.
        number: the attempt's number, 0 if it has not taken over the trial.
        batches: those in its manifest's key; None until the commit begins.
        code: the stored code that its manifest will name. No prune deletes it meanwhile.
    """

    trial: str
    uuid: str
    attempt: str
    created_at: str
    number: int = 0
    batches: Count | None = None
    code: StoredCode | None = None

    @property
    def key(self) -> str:
        """The intent's key."""
        return layout.intent_key(self.trial, self.uuid)


@dataclass(frozen=True)
class SweptUpload:
    """The leftovers of one upload, which a sweep has deleted.

    Attributes:
        uuid: the checkpoint's; None: other files of the trial.
        attempt: the id of the attempt that uploaded, None if not known.
        files: number of complete files.
        size_bytes: their total size.
        uploads: number of partially uploaded files.
    """

    uuid: str | None
    attempt: str | None
    files: int
    size_bytes: int
    uploads: int

    def __str__(self) -> str:
        what = f"checkpoint {self.uuid}" if self.uuid else "files beside checkpoints"
        attempt = f" of attempt {self.attempt}" if self.attempt else ""
        return (
            f"{what}{attempt}, never committed: {self.files} files of {self.size_bytes} bytes, and "
            f"{self.uploads} partial uploads"
        )


def sweep(storage: Storage, trial: str, number: int | None = None) -> list[SweptUpload]:
    """Delete the leftovers of a trial's uploads; return what was deleted.

    Args:
        number: the sweeping attempt's number: uploads of later attempts are left alone. None: no
            other attempt may be running.
    """
    begun = intents(storage, trial, number)
    committed = _remove_partial_manifests(storage, trial, {intent.uuid for intent in begun})
    swept = []
    for intent in begun:
        if intent.uuid in committed or not _prevent_commit(storage, intent):
            storage.remove(intent.key)  # the driver was killed after the commit
            continue
        cleared = storage.clear(layout.files_folder(intent.uuid))
        # In this order, the next sweep finds what is left if this one is killed here.
        if intent.batches is not None:
            storage.remove(layout.manifest_key(trial, intent.batches, intent.uuid))
        storage.remove(intent.key)
        swept.append(SweptUpload(intent.uuid, intent.attempt or None, *cleared))
    for folder in layout.trial_folders(trial):
        if uploads := storage.abort_uploads(folder):
            swept.append(SweptUpload(None, None, 0, 0, uploads))
    return swept


def read_intent(storage: Storage, trial: str, uuid: str) -> Intent | None:
    """The intent to upload a checkpoint, None if there is none.

    An unreadable intent still announces its upload: the key says which.
    """
    key = layout.intent_key(trial, uuid)
    data = storage.read(key)
    if data is None:
        return None
    read = decode_json(data, Intent, f"{storage.url}/{key}")
    if read is None:
        return Intent(trial=trial, uuid=uuid, attempt="", created_at="")
    return msgspec.structs.replace(read, trial=trial, uuid=uuid)


def intents(storage: Storage, trial: str, number: int | None = None) -> list[Intent]:
    """A trial's intents, without those of attempts later than `number`."""
    found = []
    for _, name in named_keys(storage, layout.intents_folder(trial), layout.parse_intent_key):
        intent = read_intent(storage, trial, name.uuid)
        if intent is not None and (number is None or intent.number <= number):
            found.append(intent)
    return found


def _remove_partial_manifests(storage: Storage, trial: str, uuids: Collection[str]) -> set[str]:
    """Delete a trial's partly written manifests; return which of the checkpoints are committed.

    In a storage without conditional writes, a broken connection may leave a partly written
    manifest. Such a checkpoint is not committed. A checkpoint of another trial, which a copied
    intent may name, counts as committed.
    """
    found: set[str] = set()
    if not uuids:
        return found
    for key, size_bytes in storage.sizes(layout.MANIFESTS).items():
        name = layout.parse_manifest_key(key)
        if name is None or name.uuid not in uuids:
            continue
        if name.trial != trial:
            found.add(name.uuid)
            continue
        data = storage.read(key)
        if data is not None and len(data) == size_bytes and not is_json(data):
            storage.remove(key)
        elif data is not None and not is_tombstone(data):
            found.add(name.uuid)
    return found


def _prevent_commit(storage: Storage, intent: Intent) -> bool:
    """Make sure that the checkpoint cannot be committed any more; False: it has just been."""
    if intent.batches is None:
        return True  # its attempt checks the fence before it commits
    key = layout.manifest_key(intent.trial, intent.batches, intent.uuid)
    try:
        lock_folder = layout.trial_locks_folder(intent.trial)
        create_only(storage, key, tombstone(intent.uuid), lock_folder)
    except FileExistsError:
        return False
    return True
