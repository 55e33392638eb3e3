"""Pins: a person's objects that protect checkpoints from pruning; and all that protects them.

::

    pins/{uuid}.json     who has pinned the checkpoint, when and why

`deletion_markers` describes what happens when a pin and a deletion meet.
"""

from __future__ import annotations

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_json, encode_json, named_keys, user_at_host
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound
from trial_core.retention.deletion_markers import protect
from trial_core.retention.holds import WHEN_RELEASED, describe_holds, holds


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A person's pin on a checkpoint.

    Attributes:
        uuid: the checkpoint's.
        reason: the person's reason; may be empty.
        by: who pinned it: ``user@host``.
        at: when: ISO 8601, UTC.
    """

    uuid: str
    reason: str
    by: str
    at: str

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"pinned by {self.by}{reason}"


def pin(store: CheckpointStore, uuid: str, reason: str = "", by: str | None = None) -> Pin:
    """Pin a checkpoint. Afterwards the checkpoint is there and no rule deletes it.

    Args:
        uuid: the checkpoint's, or an unambiguous prefix of it. An earlier pin is replaced.
        by: who pins; by default this user on this machine.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or it has just been deleted.
        CommitConflict: the checkpoint is being deleted.
        StorageError: the storage failed. The checkpoint may be pinned: pin it again.
    """
    manifest = store.open(uuid)
    made = Pin(uuid=manifest.uuid, reason=reason, by=by or user_at_host(), at=utc_now())
    protect(store, manifest.name, layout.pin_key(manifest.uuid), encode_json(made))
    return made


def unpin(store: CheckpointStore, uuid: str) -> Pin:
    """Delete a checkpoint's pin, and return it.

    Args:
        uuid: the checkpoint's, or an unambiguous prefix of it among all pins. The checkpoint
            itself may be gone.

    Raises:
        CheckpointNotFound: there is no such pin, or there are several; says which there are.
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
    store.storage.remove(layout.pin_key(found[0]))
    return there[found[0]]


def pins(store: CheckpointStore) -> dict[str, Pin]:
    """All pins by the checkpoint's uuid. Unreadable pins count."""
    found = {}
    for key, _ in named_keys(store.storage, layout.PINS, _parse_pin_or_hold_key):
        uuid = layout.parse_pin_key(key)
        if uuid is not None and (read := read_pin(store, uuid)) is not None:
            found[uuid] = read
    return found


def read_pin(store: CheckpointStore, uuid: str) -> Pin | None:
    """A checkpoint's pin, None if there is none."""
    key = layout.pin_key(uuid)
    data = store.storage.read(key)
    if data is None:
        return None
    read = decode_json(data, Pin, f"{store.url}/{key}")
    if read is None:
        return Pin(uuid=uuid, reason=f"{key} cannot be read", by="unknown", at="")
    return msgspec.structs.replace(read, uuid=uuid)


def protected(store: CheckpointStore) -> dict[str, str]:
    """The uuids of all pinned or held checkpoints, and why each is protected."""
    return {
        **{uuid: describe_holds(held) for uuid, held in holds(store).items()},
        **{uuid: str(made) for uuid, made in pins(store).items()},
    }


def why_protected(store: CheckpointStore, uuid: str) -> str | None:
    """Why a checkpoint is pinned or held, None if it is neither."""
    made = read_pin(store, uuid)
    if made is not None:
        return str(made)
    return describe_holds(holds(store, uuid).get(uuid, [])) or None


def _parse_pin_or_hold_key(key: str) -> str | layout.HoldName | None:
    return layout.parse_pin_key(key) or layout.parse_hold_key(key)


def _held_instead(store: CheckpointStore, prefix: str) -> str:
    """Which checkpoints with this prefix are held, as the end of an error message."""
    held = {uuid: each for uuid, each in holds(store).items() if uuid.startswith(prefix)}
    if not prefix or not held:
        return ""
    shown = ", ".join(f"{uuid} is {describe_holds(each)}" for uuid, each in held.items())
    return f"; {shown}, and {WHEN_RELEASED}"
