"""Pins: a person's word that a checkpoint stays, whatever the rules say.

A pin is an object in the storage, so everybody's rules see it::

    pins/{uuid}.json        who has pinned it, when and why
    deletions/{uuid}.json   the checkpoint is being deleted; see `pruning`

Pinning and deleting may meet. Whoever deletes first says so and then looks for a pin; whoever pins
first pins and then looks for a deletion. So at least one of the two sees the other, and gives way.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Timestamp, utc_now
from trial_core.checkpoint.notes import as_object, is_older, this_user
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, CommitConflict

PINS = "pins"
DELETIONS = "deletions"

STALE = timedelta(hours=1)
"""After so long without an end, whoever was deleting is taken for dead."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """That a checkpoint stays.

    Attributes:
        uuid: the checkpoint's.
        reason: why, in the words of whoever pinned it; may be empty.
        by: who that was: ``user@host``.
        at: when: ISO 8601, UTC.
    """

    uuid: str
    reason: str
    by: str
    at: str

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"pinned by {self.by}{reason}"


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """That a checkpoint is being deleted.

    Attributes:
        by: who deletes it: ``user@host``.
        at: when that began: ISO 8601, UTC.
        manifest: the checkpoint's manifest, as it was stored: what is still to delete.
    """

    by: str
    at: Timestamp
    manifest: str


def pin_key(uuid: str) -> str:
    """The key of a checkpoint's pin."""
    return f"{PINS}/{uuid}.json"


def deletion_key(uuid: str) -> str:
    """The key of what says that a checkpoint is being deleted."""
    return f"{DELETIONS}/{uuid}.json"


def pin(store: CheckpointStore, uuid: str, reason: str = "", by: str | None = None) -> Pin:
    """Keep a checkpoint. When this returns, it is there and no rule deletes it.

    Args:
        uuid: of the checkpoint, or an unambiguous beginning. An earlier pin is replaced.
        by: who pins; by default this user on this machine.

    Raises:
        CheckpointNotFound: none is called so; or it has just been deleted.
        CommitConflict: it is being deleted.
        StorageError: the storage failed. The checkpoint may be pinned: pin it again.
    """
    manifest = store.open(uuid)
    key = pin_key(manifest.uuid)
    before = store.storage.read(key)
    made = Pin(uuid=manifest.uuid, reason=reason, by=by or this_user(), at=utc_now())
    data = as_object(made)
    store.storage.write(key, data)
    deletion = deletion_under_way(store, manifest.uuid)
    if deletion is None and store.storage.read(manifest.name.key) is not None:
        return made
    if before is None and store.storage.read(key) == data:
        # An earlier pin stays: it may be what keeps the checkpoint.
        store.storage.remove(key)
    if deletion is None:
        raise CheckpointNotFound(f"checkpoint {manifest.uuid} has just been deleted")
    raise CommitConflict(
        f"checkpoint {manifest.uuid} is being deleted, by {deletion.by} since {deletion.at}; pin "
        "it again if it is still there afterwards"
    )


def unpin(store: CheckpointStore, uuid: str) -> Pin:
    """Leave a checkpoint to the rules again; what the pin said.

    Args:
        uuid: of the checkpoint, or the beginning that one pin alone has. The checkpoint itself
            need not be there.

    Raises:
        CheckpointNotFound: no pin, or several; says which there are.
    """
    there = pins(store)
    exact = [name for name in there if name == uuid]
    found = exact or [name for name in there if uuid and name.startswith(uuid)]
    if len(found) != 1:
        what = "no pinned checkpoint" if not found else f"{len(found)} pinned checkpoints"
        shown = ", ".join(found or sorted(there)) or "none is pinned"
        raise CheckpointNotFound(f"{what} in {store.url} begin with {uuid!r}: {shown}")
    store.storage.remove(pin_key(found[0]))
    return there[found[0]]


def pins(store: CheckpointStore) -> dict[str, Pin]:
    """All pins by the checkpoint's uuid. One that cannot be read is a pin all the same."""
    found = {}
    for key in sorted(store.storage.sizes(PINS)):
        uuid = key.removeprefix(f"{PINS}/").removesuffix(".json")
        if layout.is_uuid(uuid) and (read := read_pin(store, uuid)) is not None:
            found[uuid] = read
    return found


def read_pin(store: CheckpointStore, uuid: str) -> Pin | None:
    """The pin of a checkpoint, None where there is none."""
    data = store.storage.read(pin_key(uuid))
    if data is None:
        return None
    try:
        read = msgspec.json.decode(data, type=Pin)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Pin(uuid=uuid, reason=f"{pin_key(uuid)} cannot be read", by="unknown", at="")
    return msgspec.structs.replace(read, uuid=uuid)


def read_deletion(store: CheckpointStore, uuid: str) -> Deletion | None:
    """That a checkpoint is being deleted, or was when whoever did it died; None: it is not."""
    data = store.storage.read(deletion_key(uuid))
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Deletion)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # half an object: whoever wrote it died before deleting anything


def deletion_under_way(store: CheckpointStore, uuid: str) -> Deletion | None:
    """That a checkpoint is being deleted right now."""
    deletion = read_deletion(store, uuid)
    return None if deletion is None or is_older(deletion.at, STALE) else deletion
