"""Intents: objects that announce an upload before its first byte; and the sweep of leftovers.

A trial's next run finds the leftovers of a killed run by their intents. Without an intent, half a
checkpoint of one trial looks like an upload of another trial in progress.
`checkpoint.retention.leftovers` sweeps trials that never run again.

See `fencing` for two attempts at one trial, and `commit` for a commit that meets a sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import named_keys, read_json
from trial_core.checkpoint.manifest import NonNegative, is_tombstone, tombstone
from trial_core.checkpoint.references import References, why_unknown
from trial_core.checkpoint.storage.base import Storage
from trial_core.common.text_format import plural
from trial_core.errors import CheckpointDamaged

_logger = logging.getLogger(__name__)


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement that a checkpoint is being uploaded.

    Attributes:
        writer: `Manifest.writer` of the checkpoint; empty if the intent is unreadable.
        created_at: start of the upload: ISO 8601, UTC; empty if the intent is unreadable.
        number: the attempt's number, 0 if it has not taken over the trial.
        batches: number of batches in the manifest's key; None until the commit begins.
        base: uuid of the checkpoint whose files it may refer to; empty if there is none, or if the
            intent is unreadable. See `references`.
    """

    trial: str
    uuid: str
    writer: str = msgspec.field(name="attempt")
    created_at: str
    number: int = 0
    batches: NonNegative | None = None
    base: str = ""

    @property
    def is_readable(self) -> bool:
        """True if the intent could be read; otherwise only its key is known."""
        return bool(self.created_at)

    @property
    def key(self) -> str:
        return layout.intent_key(self.trial, self.uuid)


@dataclass(frozen=True)
class SweptUpload:
    """The leftovers of one upload, which a sweep has deleted: complete files, and partially
    uploaded ones.

    Attributes:
        uuid: the checkpoint's uuid, or None for other files of the trial.
        writer: `Manifest.writer` of the upload, or None if not known.
    """

    uuid: str | None
    writer: str | None
    files: int
    size_bytes: int
    uploads: int

    def __str__(self) -> str:
        what = f"checkpoint {self.uuid}" if self.uuid else "files beside checkpoints"
        writer = f" of launch {self.writer}" if self.writer else ""
        return (
            f"{what}{writer}, never committed: {plural(self.files, 'file')} of {self.size_bytes} "
            f"bytes, and {plural(self.uploads, 'partial upload')}"
        )


def sweep(
    storage: Storage, trial: str, references: Callable[[], References], number: int | None = None
) -> list[SweptUpload]:
    """Delete the leftovers of a trial's uploads, and return them. Files that the trial's
    checkpoints refer to stay: an intent may outlive its checkpoint.

    `number` is the sweeping attempt's. Uploads of later attempts stay. So do the attempt's own
    files outside checkpoints, whose upload began after its take-over. None if no attempt may be
    running.
    """
    begun = intents(storage, trial, number)
    committed = _committed(storage, trial, {intent.uuid for intent in begun})
    swept = []
    for intent in begun:
        if intent.uuid in committed or not _prevent_commit(storage, intent):
            storage.remove(intent.key)  # the driver was killed after the commit
            continue
        needed = references()
        if (why := why_unknown(storage, needed)) is not None:
            _logger.warning("leftovers of checkpoint %s stay: %s", intent.uuid, why)
            continue
        cleared = storage.clear(layout.files_folder(intent.uuid), needed.keys)
        # In this order, the next sweep finds the rest if this one is killed here.
        if intent.batches is not None:
            storage.remove(layout.manifest_key(trial, intent.batches, intent.uuid))
        storage.remove(intent.key)
        swept.append(SweptUpload(intent.uuid, intent.writer or None, *cleared))
    began_at = None
    if number is not None:
        records = storage.objects(layout.attempts_folder(trial))
        record = records.get(layout.attempt_key(trial, number))
        began_at = None if record is None else record.modified_at
        if began_at is None:
            return swept  # the attempt's own uploads cannot be told from others
    for folder in layout.trial_folders(trial):
        if uploads := storage.abort_uploads(folder, began_at):
            swept.append(SweptUpload(None, None, 0, 0, uploads))
    return swept


def read_intent(storage: Storage, trial: str, uuid: str) -> Intent | None:
    """The intent to upload a checkpoint, or None. An unreadable intent still announces the upload
    that its key names."""
    key = layout.intent_key(trial, uuid)
    unknown = Intent(trial=trial, uuid=uuid, writer="", created_at="")
    read = read_json(storage, key, Intent, unknown)
    return None if read is None else msgspec.structs.replace(read, trial=trial, uuid=uuid)


def intent_names(storage: Storage, trial: str | None = None) -> list[layout.IntentName]:
    folder = layout.UPLOADS if trial is None else layout.intents_folder(trial)
    return [name for _, name in named_keys(storage, folder, layout.parse_intent_key)]


def intents(storage: Storage, trial: str | None, number: int | None = None) -> list[Intent]:
    """A trial's intents, or all (None), without those of attempts later than `number`."""
    found = (read_intent(storage, *name) for name in intent_names(storage, trial))
    return [each for each in found if each and (number is None or each.number <= number)]


def uploads(storage: Storage, trial: str | None = None) -> list[Intent]:
    """The intents of a trial, or all, whose checkpoint is not committed. A late duplicate of its
    write may bring an intent back after the commit. A sweep deletes it."""
    begun = intents(storage, trial)
    committed: set[tuple[str, str]] = set()
    for each in sorted({intent.trial for intent in begun}):
        uuids = {intent.uuid for intent in begun if intent.trial == each}
        committed |= {(each, uuid) for uuid in _committed(storage, each, uuids)}
    return [each for each in begun if (each.trial, each.uuid) not in committed]


def _committed(storage: Storage, trial: str, uuids: Collection[str]) -> set[str]:
    """The uuids of the checkpoints that are committed. A checkpoint of another trial, which a
    copied intent may name, counts as committed."""
    if not uuids:
        return set()
    names = map(layout.parse_manifest_key, storage.sizes(layout.MANIFESTS))
    found = [name for name in names if name is not None and name.uuid in uuids]
    return {name.uuid for name in found if name.trial != trial or has_manifest(storage, name.key)}


def has_manifest(storage: Storage, key: str) -> bool:
    """Return whether an object that is not a tombstone is stored under a manifest's key."""
    try:
        data = storage.read(key)
    except CheckpointDamaged:  # it is too large for a tombstone
        return True
    return data is not None and not is_tombstone(data)


def _prevent_commit(storage: Storage, intent: Intent) -> bool:
    """Make sure that the checkpoint can no longer be committed; return False if it just was."""
    if intent.batches is None:
        return True  # its attempt checks the fence before it commits
    key = layout.manifest_key(intent.trial, intent.batches, intent.uuid)
    try:
        storage.create(key, tombstone(intent.uuid))
    except FileExistsError:
        return False
    return True
