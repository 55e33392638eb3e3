"""Holds: the registry's objects that protect checkpoints from pruning.

::

    pins/{uuid}/{model}/{move:06d}-{unique}.json     which version of which model it is

`models.alias_moves` places a hold before a promotion and removes it after a later move.
"""

from __future__ import annotations

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_json, encode_json
from trial_core.checkpoint.store import CheckpointStore
from trial_core.retention.deletion_markers import protect

WHEN_RELEASED = "the registry releases it once it is neither champion nor previous"


class RegistryHold(msgspec.Struct, frozen=True, kw_only=True):
    """The registry's hold on a checkpoint.

    Attributes:
        uuid: the checkpoint's.
        model: the model of which it is a version.
        version: the version's number, 0 if the hold is unreadable.
        move: number of the move of the model's aliases that the hold was placed for.
        unique: id of that move: a concurrent move may have the same number.
        by: who made the move: ``user@host``.
        at: when: ISO 8601, UTC.
    """

    uuid: str
    model: str
    version: int
    move: int
    unique: str
    by: str
    at: str

    @property
    def key(self) -> str:
        """The hold's key."""
        return layout.hold_key(layout.HoldName(self.uuid, self.model, self.move, self.unique))

    def __str__(self) -> str:
        version = f"version {self.version}" if self.version else "unreadable version"
        return f"held by model {self.model}, {version}"


def hold(store: CheckpointStore, name: layout.ManifestName, placed: RegistryHold) -> None:
    """Place a hold on a checkpoint. Afterwards the checkpoint is there and no rule deletes it.

    Raises:
        CheckpointNotFound: the checkpoint has just been deleted.
        CommitConflict: the checkpoint is being deleted.
        StorageError: the storage failed. The hold may be placed.
    """
    protect(store, name, placed.key, encode_json(placed))


def holds(store: CheckpointStore, uuid: str | None = None) -> dict[str, list[RegistryHold]]:
    """All holds, or those on one checkpoint, by the checkpoint's uuid. Unreadable holds count."""
    found: dict[str, list[RegistryHold]] = {}
    folder = layout.PINS if uuid is None else layout.holds_folder(uuid)
    for key in sorted(store.storage.sizes(folder)):
        name = layout.parse_hold_key(key)
        data = store.storage.read(key) if name is not None else None
        if name is None or data is None:
            continue  # a pin, or a hold that has just been released
        read = decode_json(data, RegistryHold, f"{store.url}/{key}")
        if read is None:
            read = RegistryHold(**name._asdict(), version=0, by="unknown", at="")
        found.setdefault(name.uuid, []).append(msgspec.structs.replace(read, **name._asdict()))
    for of_checkpoint in found.values():
        of_checkpoint.sort(key=lambda each: (each.model, each.move))
    return found


def describe_holds(of_checkpoint: list[RegistryHold]) -> str:
    """Why a checkpoint is held: each model and version once."""
    return "; ".join(dict.fromkeys(map(str, of_checkpoint)))
