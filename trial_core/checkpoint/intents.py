"""Intents: a word in the storage that a checkpoint is being uploaded, before its first byte is.

What a killed run leaves behind is then found by its trial's next run, and by nobody else: without
its intent, half a checkpoint of one trial looks like the upload under way of another.

Two runs may train one trial without knowing of each other: a driver that its server took for dead
is not always dead. So whoever sweeps first says so in the intent, then looks for the manifest;
whoever commits writes the manifest first, then looks at the intent. At least one of the two sees
the other, so no checkpoint is listed whose files a sweep deletes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import is_json, utc_now
from trial_core.checkpoint.storage import Storage


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """That a checkpoint is being uploaded.

    Attributes:
        trial: whose.
        uuid: which.
        attempt: id of the writer.
        created_at: when it began: ISO 8601, UTC.
        swept_at: when a later run of the trial took it for given up, and began to delete it.
    """

    trial: str
    uuid: str
    attempt: str
    created_at: str
    swept_at: str | None = None

    @property
    def key(self) -> str:
        """Where it is stored."""
        return layout.intent_key(self.trial, self.uuid)


@dataclass(frozen=True)
class Swept:
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


def sweep(storage: Storage, trial: str) -> list[Swept]:
    """Delete what uploads of a trial that never ended have left; what that was."""
    claimed = _claim(storage, trial)
    spared = _committed(storage, trial, {intent.uuid for intent in claimed})  # not before the claim
    swept = []
    for intent in claimed:
        if intent.uuid in spared:
            storage.remove(intent.key)  # its writer died between the two
            continue
        cleared = storage.clear(layout.files_folder(intent.uuid))
        storage.remove(intent.key)
        swept.append(Swept(intent.uuid, intent.attempt or None, *cleared))
    for folder in layout.folders_of(trial):
        if uploads := storage.end_uploads(folder):
            swept.append(Swept(None, None, 0, 0, uploads))
    return swept


def as_object(intent: Intent) -> bytes:
    """What is stored: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(intent), indent=2) + b"\n"


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


def _claim(storage: Storage, trial: str) -> list[Intent]:
    """All intents of a trial, each now marked as swept, so that who wrote it cannot commit."""
    claimed = []
    for key in sorted(storage.sizes(layout.intents_folder(trial))):
        uuid = layout.parse_intent_key(key)
        intent = read_intent(storage, trial, uuid) if uuid is not None else None
        if intent is not None:
            intent = msgspec.structs.replace(intent, swept_at=intent.swept_at or utc_now())
            storage.write(intent.key, as_object(intent))
            claimed.append(intent)
    return claimed


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
        elif data is not None:
            found.add(name.uuid)
    return found
