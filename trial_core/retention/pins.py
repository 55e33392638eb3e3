"""Pins and holds: a person's and the registry's word that a checkpoint stays, whatever the rules.

They are objects in the storage, so everybody's rules see them::

    pins/{uuid}.json                               who has pinned it, when and why
    pins/{uuid}/{model}/{move:06d}-{unique}.json   the registry holds it; see `trial_core.models`
    deletions/{uuid}.json                          the checkpoint is being deleted; see `pruning`

Pinning and deleting may meet. Whoever deletes first says so and then looks for a pin; whoever pins
first pins and then looks for a deletion. So at least one of the two sees the other, and gives way.
A hold is made and looked for as a pin is.
"""

from __future__ import annotations

import re
from datetime import timedelta

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, is_older, user_at_host
from trial_core.checkpoint.layout import ManifestName
from trial_core.checkpoint.manifest import Timestamp, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, CommitConflict

PINS = "pins"
DELETIONS = "deletions"

WHAT_FREES = "the registry gives it up once it is neither champion nor previous"

_HOLD_KEY = re.compile(
    rf"{PINS}/(?P<uuid>[^/]+)/(?P<model>[^/]+)/(?P<move>[0-9]{{6,}})-(?P<unique>[^/]+)\.json"
)

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


class RegistryHold(msgspec.Struct, frozen=True, kw_only=True):
    """That the registry needs a checkpoint.

    Attributes:
        uuid: the checkpoint's.
        model: the model of which it is a version.
        version: number of that; 0: the hold cannot be read.
        move: number of the move of the model's aliases for which it is held.
        unique: of that move: another of the same number may have come first.
        by: who moved them: ``user@host``.
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
        """Where it is stored."""
        return f"{PINS}/{self.uuid}/{self.model}/{self.move:06d}-{self.unique}.json"

    def __str__(self) -> str:
        version = f", version {self.version}" if self.version else " (which version, is unreadable)"
        return f"held by model {self.model}{version}"


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
    made = Pin(uuid=manifest.uuid, reason=reason, by=by or user_at_host(), at=utc_now())
    data = encode_json(made)
    store.storage.write(key, data)
    try:
        check_that_it_stays(store, manifest.name)
    except (CheckpointNotFound, CommitConflict):
        if before is None and store.storage.read(key) == data:
            # An earlier pin stays: it may be what keeps the checkpoint.
            store.storage.remove(key)
        raise
    return made


def hold(store: CheckpointStore, name: ManifestName, held: RegistryHold) -> None:
    """Keep a checkpoint for the registry. When this returns, it is there and no rule deletes it.

    Raises:
        CheckpointNotFound: it has just been deleted.
        CommitConflict: it is being deleted.
        StorageError: the storage failed. The checkpoint may be held.
    """
    store.storage.write(held.key, encode_json(held))
    try:
        check_that_it_stays(store, name)
    except (CheckpointNotFound, CommitConflict):
        store.storage.remove(held.key)
        raise


def check_that_it_stays(store: CheckpointStore, name: ManifestName) -> None:
    """Look whether a checkpoint that has just been pinned or held is still there, and stays.

    Raises:
        CheckpointNotFound: it is not there.
        CommitConflict: it is being deleted.
    """
    deletion = deletion_under_way(store, name.uuid)
    if deletion is not None:
        raise CommitConflict(
            f"checkpoint {name.uuid} is being deleted, by {deletion.by} since {deletion.at}; try "
            "again, in case it is still there afterwards"
        )
    if store.storage.read(name.key) is None:
        raise CheckpointNotFound(f"checkpoint {name.uuid} has just been deleted")


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
        raise CheckpointNotFound(
            f"{what} in {store.url} begin with {uuid!r}: {shown}{_held_besides(store, uuid)}"
        )
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


def holds(store: CheckpointStore) -> dict[str, list[RegistryHold]]:
    """What the registry holds, by the checkpoint's uuid. A hold that cannot be read is one."""
    return _holds_below(store, PINS)


def read_holds(store: CheckpointStore, uuid: str) -> list[RegistryHold]:
    """The registry's holds on a checkpoint."""
    return _holds_below(store, f"{PINS}/{uuid}").get(uuid, [])


def kept(store: CheckpointStore) -> dict[str, str]:
    """The uuids of all checkpoints that are pinned or held, and why."""
    return {
        **{uuid: _in_words(held) for uuid, held in holds(store).items()},
        **{uuid: str(made) for uuid, made in pins(store).items()},
    }


def why_kept(store: CheckpointStore, uuid: str) -> str | None:
    """Why a checkpoint is pinned or held; None: it is neither."""
    made = read_pin(store, uuid)
    if made is not None:
        return str(made)
    return _in_words(read_holds(store, uuid)) or None


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


def _holds_below(store: CheckpointStore, folder: str) -> dict[str, list[RegistryHold]]:
    found: dict[str, list[RegistryHold]] = {}
    for key in sorted(store.storage.sizes(folder)):
        match = _HOLD_KEY.fullmatch(key)
        data = store.storage.read(key) if match is not None else None
        if match is None or data is None:
            continue  # a pin; or it has just been given up
        try:
            read = msgspec.json.decode(data, type=RegistryHold)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            read = RegistryHold(
                uuid="", model="", version=0, move=0, unique="", by="unknown", at=""
            )
        said = msgspec.structs.replace(
            read, uuid=match["uuid"], model=match["model"], move=int(match["move"]),
            unique=match["unique"],
        )  # fmt: skip
        found.setdefault(said.uuid, []).append(said)
    return {
        uuid: sorted(of_one, key=lambda held: (held.model, held.move))
        for uuid, of_one in found.items()
    }


def _held_besides(store: CheckpointStore, begins: str) -> str:
    """Which checkpoints whose uuids begin so the registry holds, to follow what is not pinned."""
    held = {uuid: of_one for uuid, of_one in holds(store).items() if uuid.startswith(begins)}
    if not begins or not held:
        return ""
    said = ", ".join(f"{uuid} is {_in_words(of_one)}" for uuid, of_one in held.items())
    return f"; {said}, and {WHAT_FREES}"


def _in_words(of_one: list[RegistryHold]) -> str:
    """Why a checkpoint is held: each model and version once."""
    return "; ".join(dict.fromkeys(map(str, of_one)))


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
