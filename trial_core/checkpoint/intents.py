"""Intents: a word in the storage that a checkpoint is being uploaded, before its first byte is.

What a killed run leaves behind is then found by its trial's next run: without its intent, half a
checkpoint of one trial looks like the upload under way of another. For trials that never run again,
see `leftovers`.

Two attempts may train one trial without knowing of each other: see `fencing`, and for what becomes
of a commit that meets a sweep, `committing`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Count, is_json, is_void, void
from trial_core.storage.base import Storage


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """That a checkpoint is being uploaded.

    Attributes:
        trial: whose.
        uuid: which.
        attempt: id of the writer.
        created_at: when it began: ISO 8601, UTC.
        number: the attempt's, if it has taken the trial over.
        batches: what its manifest's key says; known once it is about to be committed.
    """

    trial: str
    uuid: str
    attempt: str
    created_at: str
    number: int = 0
    batches: Count | None = None

    @property
    def key(self) -> str:
        """Where it is stored."""
        return layout.intent_key(self.trial, self.uuid)


@dataclass(frozen=True)
class SweptUpload:
    """What a sweep has found of an upload that never ended, and deleted.

    Attributes:
        uuid: of the checkpoint that it would have been; None: of other files of the trial.
        attempt: whose it was, if that is known.
        files: how many were stored whole.
        size_bytes: their size together.
        uploads: how many files were stored in part.
    """

    uuid: str | None
    attempt: str | None
    files: int
    size_bytes: int
    uploads: int

    def __str__(self) -> str:
        what = f"checkpoint {self.uuid}" if self.uuid else "files beside checkpoints"
        whose = f" of attempt {self.attempt}" if self.attempt else ""
        return (
            f"{what}{whose}, never committed: {self.files} files of {self.size_bytes} bytes, and "
            f"{self.uploads} in part"
        )


def sweep(storage: Storage, trial: str, number: int | None = None) -> list[SweptUpload]:
    """Delete what uploads of a trial that never ended have left; what that was.

    Args:
        number: of the attempt that sweeps, and has nothing under way: what later ones upload is
            left alone. None: nobody else may be at the trial.
    """
    begun = intents(storage, trial, number)
    committed = _committed(storage, trial, {intent.uuid for intent in begun})
    swept = []
    for intent in begun:
        if intent.uuid in committed or not _is_given_up(storage, intent):
            storage.remove(intent.key)  # its writer died between the two
            continue
        cleared = storage.clear(layout.files_folder(intent.uuid))
        # In this order: what is left of a sweep that dies here is found again.
        if intent.batches is not None:
            storage.remove(layout.manifest_key(trial, intent.batches, intent.uuid))
        storage.remove(intent.key)
        swept.append(SweptUpload(intent.uuid, intent.attempt or None, *cleared))
    for folder in layout.folders_of(trial):
        if uploads := storage.end_uploads(folder):
            swept.append(SweptUpload(None, None, 0, 0, uploads))
    return swept


def read_intent(storage: Storage, trial: str, uuid: str) -> Intent | None:
    """The intent to upload a checkpoint; None where there is none."""
    data = storage.read(layout.intent_key(trial, uuid))
    if data is None:
        return None
    try:
        read = msgspec.json.decode(data, type=Intent)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # half of one: its writer was killed
        read = Intent(trial=trial, uuid=uuid, attempt="", created_at="")
    return msgspec.structs.replace(read, trial=trial, uuid=uuid)


def intents(storage: Storage, trial: str, number: int | None = None) -> list[Intent]:
    """The intents of a trial, but for those of attempts later than that one."""
    found = []
    for key in sorted(storage.sizes(layout.intents_folder(trial))):
        uuid = layout.parse_intent_key(key)
        intent = read_intent(storage, trial, uuid) if uuid is not None else None
        if intent is not None and (number is None or intent.number <= number):
            found.append(intent)
    return found


def _committed(storage: Storage, trial: str, uuids: Collection[str]) -> set[str]:
    """Which of those checkpoints are committed now. Half a manifest, which a broken connection may
    leave where a storage has no conditional write, makes none, and goes."""
    found = set()
    for key, size_bytes in storage.sizes(layout.trial_folder(trial)).items():
        name = layout.parse_manifest_key(key)
        if name is None or name.uuid not in uuids:
            continue
        data = storage.read(key)
        if data is not None and len(data) == size_bytes and not is_json(data):
            storage.remove(key)
        elif data is not None and not is_void(data):
            found.add(name.uuid)
    return found


def _is_given_up(storage: Storage, intent: Intent) -> bool:
    """Whether nobody can commit that checkpoint any more; False: somebody has, just now."""
    if intent.batches is None:
        return True  # whoever uploads it has yet to look who has taken over
    key = layout.manifest_key(intent.trial, intent.batches, intent.uuid)
    try:
        storage.create(key, void(intent.uuid))
    except FileExistsError:
        return False
    return True
