"""Protections: stored objects that keep a checkpoint until they are removed, whatever the rules.

A person's pin tells who, when and why; the registry's hold, which version of a model.
`models.promotion` places a hold before a promotion and removes it after a later move. The
checkpoints that a running trial needs are in its claim: see `claims`. `deletion_markers` describes
how a protection and a deletion give way when they meet.
"""

from __future__ import annotations

import uuid as uuids
from typing import Literal

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, named_keys, read_json, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.retention.deletion_markers import protect
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound

ProtectionKind = Literal["pin", "hold"]

WHEN_RELEASED = "the registry releases it once it is neither champion nor previous"


class Protection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A person's pin on a checkpoint, or the registry's hold.

    Attributes:
        by, at: who made it: ``user@host``; and when: ISO 8601, UTC.
        model, version: of a hold: the checkpoint's version; 0 if the hold is unreadable.
        move: of a hold: number of the move of the model's aliases that it was placed for.
        unique: of a hold: id of that move, as a concurrent move may have the same number; of a
            pin: an id of its own.
    """

    uuid: str
    kind: ProtectionKind = "pin"
    by: str
    at: str
    reason: str = ""
    model: str = ""
    version: int = 0
    move: int = 0
    unique: str = ""

    @property
    def key(self) -> str:
        name = layout.ProtectionName(self.uuid, self.kind, self.model, self.move, self.unique)
        return name.key

    def __str__(self) -> str:
        if self.kind == "hold":
            version = f"version {self.version}" if self.version else "unreadable version"
            return f"held by model {self.model}, {version}"
        return f"pinned by {self.by}{f': {self.reason}' if self.reason else ''}"


def pin(store: CheckpointStore, uuid: str, reason: str = "", by: str | None = None) -> Protection:
    """Pin a checkpoint, by its uuid or an unambiguous prefix of it; an earlier pin is replaced.
    `by`: who pins; by default this user on this machine. Raises as `protect`, also if no checkpoint
    matches."""
    manifest = store.open(uuid)
    earlier = protections(store, manifest.uuid, kind="pin").get(manifest.uuid, [])
    # A refused pin is removed. It has its own key, so that the removal spares another person's pin
    # of the same time. It keeps that key: a second write could come after an unpin and a prune, and
    # stay for a checkpoint that is gone.
    made = Protection(
        uuid=manifest.uuid, by=by or user_at_host(), at=utc_now(), reason=reason,
        unique=uuids.uuid4().hex,
    )  # fmt: skip
    protect(store, manifest.name, made.key, encode_json(made))
    for each in earlier:
        store.storage.remove(each.key)
    return made


def unpin(store: CheckpointStore, uuid: str) -> Protection:
    """Delete a checkpoint's pins, and return one of them.

    `uuid` may be an unambiguous prefix among all pins: the checkpoint itself may be gone. Raises
    CheckpointNotFound if no pin matches, or several do; it says which there are.
    """
    there = pins(store)
    exact = [name for name in there if name == uuid]
    found = exact or [name for name in there if uuid and name.startswith(uuid)]
    if len(found) != 1:
        what = "no pinned checkpoint" if not found else f"{len(found)} pinned checkpoints"
        shown = ", ".join(found or sorted(there)) or "none is pinned"
        raise CheckpointNotFound(
            f"{what} in {store.url} begin with {uuid!r}: {shown}{_held_instead(store, uuid)}"
        )
    for each in protections(store, found[0], kind="pin").get(found[0], []):
        store.storage.remove(each.key)
    return there[found[0]]


def pins(store: CheckpointStore) -> dict[str, Protection]:
    """All pins, by the checkpoint's uuid."""
    return {uuid: made[0] for uuid, made in protections(store, kind="pin").items()}


def protections(
    store: CheckpointStore, uuid: str | None = None, kind: ProtectionKind | None = None
) -> dict[str, list[Protection]]:
    """The protections (of one checkpoint, or of one kind) by uuid, a pin first; also unreadable."""
    found: dict[str, list[Protection]] = {}
    folder = layout.PINS if uuid is None else layout.protections_folder(uuid)
    for key, name in named_keys(store.storage, folder, layout.parse_protection_key):
        if kind is not None and name.kind != kind:
            continue
        unknown = Protection(uuid=name.uuid, by="unknown", at="", reason=f"{key} cannot be read")
        read = read_json(store.storage, key, Protection, unknown)
        if read is None:  # it has just been removed, maybe for another that the list lacks
            return protections(store, uuid, kind)
        found.setdefault(name.uuid, []).append(msgspec.structs.replace(read, **name._asdict()))
    for of_checkpoint in found.values():
        of_checkpoint.sort(
            key=lambda each: (each.kind != "pin", each.model, each.move, each.unique)
        )
    return found


def protected(
    store: CheckpointStore, uuid: str | None = None, kind: ProtectionKind | None = None
) -> dict[str, str]:
    """Why checkpoints are protected, by uuid, each reason once. Arguments as of `protections`."""
    found = protections(store, uuid, kind)
    return {each: "; ".join(dict.fromkeys(map(str, made))) for each, made in found.items()}


def _held_instead(store: CheckpointStore, prefix: str) -> str:
    held = protected(store, kind="hold")
    shown = [f"{each} is {why}" for each, why in held.items() if prefix and each.startswith(prefix)]
    return f"; {', '.join(shown)}, and {WHEN_RELEASED}" if shown else ""
