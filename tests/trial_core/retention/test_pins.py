"""Pins: what a person wants to stay, stays, whoever prunes at the same moment."""

from __future__ import annotations

import itertools
import uuid
from functools import partial
from pathlib import Path

import pytest

from tests.support.interleaving import interleave
from tests.support.manifests import entry, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import deletion_key, pin_key
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, CommitConflict
from trial_core.retention.deletions import Deletion
from trial_core.retention.pins import Pin, pin, pins, read_pin, unpin
from trial_core.retention.policy import RetentionPolicy
from trial_core.retention.pruning import plan_pruning, prune

NOTHING = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
LONG_AGO = "2001-05-09T17:04:00.000000Z"


def commit(store: CheckpointStore, batches: int = 7) -> Manifest:
    """A committed checkpoint of one small file."""
    manifest = new_manifest(batches, files=[entry("shard")])
    store.storage.write(layout.file_key(manifest.uuid, "shard"), b"x")
    store.commit(manifest)
    return manifest


def begin_deletion(store: CheckpointStore, manifest: Manifest, at: str) -> None:
    said = Deletion(by="ann@here", at=at, manifest=manifest.to_json().decode())
    store.storage.write(deletion_key(manifest.uuid), encode_json(said))


def test_a_pin_says_who_and_why(store: CheckpointStore) -> None:
    """On every kind of storage; a beginning of the uuid will do, to pin and to unpin."""
    manifest = commit(store)
    made = pin(store, manifest.uuid[:9], "figure 3", by="ann@here")
    assert pins(store) == {manifest.uuid: made}
    assert (made.uuid, made.reason, made.by) == (manifest.uuid, "figure 3", "ann@here")
    assert str(made) == "pinned by ann@here: figure 3"
    assert unpin(store, manifest.uuid[:9]) == made
    assert pins(store) == {}


def test_a_pin_is_replaced(local_store: CheckpointStore) -> None:
    """The last reason given is the one that is shown."""
    manifest = commit(local_store)
    pin(local_store, manifest.uuid, "figure 3")
    second = pin(local_store, manifest.uuid, "figure 4")
    assert read_pin(local_store, manifest.uuid) == second


def test_what_is_not_there_is_not_pinned(local_store: CheckpointStore) -> None:
    """Neither a checkpoint nor a pin; what there is, is said."""
    manifest = commit(local_store)
    with pytest.raises(CheckpointNotFound, match="begins with 'abc'"):
        pin(local_store, "abc")
    pin(local_store, manifest.uuid)
    with pytest.raises(CheckpointNotFound, match=f"begin with 'abc': {manifest.uuid}"):
        unpin(local_store, "abc")


def test_an_ambiguous_beginning_unpins_nothing(local_store: CheckpointStore) -> None:
    """Whoever means one must say which."""
    for name in ("aaaa-1", "aaaa-2"):
        local_store.storage.write(
            pin_key(name), encode_json(Pin(uuid=name, reason="", by="", at=""))
        )
    with pytest.raises(CheckpointNotFound, match=r"2 pinned checkpoints .*aaaa-1, aaaa-2"):
        unpin(local_store, "aaaa")
    assert unpin(local_store, "aaaa-2").uuid == "aaaa-2"
    assert list(pins(local_store)) == ["aaaa-1"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"uuid": 3}'])
def test_a_pin_that_cannot_be_read_is_a_pin(local_store: CheckpointStore, data: bytes) -> None:
    """Somebody meant the checkpoint to stay."""
    manifest = commit(local_store)
    local_store.storage.write(pin_key(manifest.uuid), data)
    (decision,) = plan_pruning(local_store, NOTHING, "gpt").decisions
    assert decision.keep
    assert "cannot be read" in decision.why


def test_what_is_being_deleted_cannot_be_pinned(local_store: CheckpointStore) -> None:
    """It says who deletes it, and leaves no pin; one that was there before stays."""
    manifest = commit(local_store)
    begin_deletion(local_store, manifest, utc_now())
    with pytest.raises(CommitConflict, match="is being deleted, by ann@here"):
        pin(local_store, manifest.uuid)
    assert pins(local_store) == {}
    local_store.storage.write(pin_key(manifest.uuid), b"an older pin")
    with pytest.raises(CommitConflict):
        pin(local_store, manifest.uuid)
    assert list(pins(local_store)) == [manifest.uuid]


def test_one_who_died_while_deleting_does_not_keep_others_from_pinning(
    local_store: CheckpointStore,
) -> None:
    """As long as the checkpoint is there."""
    manifest = commit(local_store)
    begin_deletion(local_store, manifest, LONG_AGO)
    pin(local_store, manifest.uuid)
    assert list(pins(local_store)) == [manifest.uuid]


@pytest.mark.parametrize("begun", range(7))
def test_pin_and_prune_at_the_same_moment(begun: int) -> None:
    """In whatever order their requests come: a pin that succeeded holds, and a checkpoint that is
    there is whole. First so many of the pin's, then some of the prune's, and on in turns."""
    for pruned, gone_on in itertools.product(range(9), (1, 2, 3, 9)):
        _pin_and_prune([False] * begun + [True] * pruned + [False] * gone_on + [True] * 9)


def _pin_and_prune(order: list[bool]) -> None:
    url = f"memory://{uuid.uuid4()}"
    store = CheckpointStore(url)
    manifest = commit(store)
    plan = plan_pruning(store, NOTHING, "gpt")
    pinned, pruned = interleave(
        url, partial(pin, uuid=manifest.uuid), partial(prune, plan=plan), order
    )
    is_there = store.list() == [manifest]
    files = store.storage.sizes(layout.files_folder(manifest.uuid))
    assert not isinstance(pruned, Exception)
    assert is_there == bool(files)
    if isinstance(pinned, Pin):
        assert is_there
        assert list(pins(store)) == [manifest.uuid]
        assert [decision.why for decision in pruned.spared] == [str(pinned)]
    else:
        assert isinstance(pinned, (CheckpointNotFound, CommitConflict))
        assert pins(store) == {}
    assert store.storage.sizes("deletions") == {}


def test_the_order_reaches_both_ends() -> None:
    """The test above can tell: there are orders in which the pin wins, and others in which not."""
    outcomes = set()
    for order in ([False] * 12, [True] * 12):
        url = f"memory://{uuid.uuid4()}"
        store = CheckpointStore(url)
        manifest = commit(store)
        plan = plan_pruning(store, NOTHING, "gpt")
        interleave(
            url, lambda own, m=manifest: pin(own, m.uuid), lambda own, p=plan: prune(own, p), order
        )
        outcomes.add(bool(store.list()))
    assert outcomes == {True, False}


def test_pins_lie_beside_the_checkpoints(tmp_path: Path) -> None:
    """Where anybody can read them."""
    store = CheckpointStore(str(tmp_path))
    manifest = commit(store)
    pin(store, manifest.uuid, "figure 3")
    assert '"reason": "figure 3"' in (tmp_path / "pins" / f"{manifest.uuid}.json").read_text()
