"""A pinned checkpoint is not deleted, also if it is pruned at the same moment."""

from __future__ import annotations

import itertools
import uuid
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest

from tests.support.interleaving import interleave, interleave_all
from tests.support.manifests import commit_files
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import ProtectionName
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.retention.protections import (
    Protection,
    pin,
    pins,
    protected,
    protections,
    unpin,
)
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, CommitConflict

KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


def test_a_pin_says_who_and_why(store: CheckpointStore) -> None:
    """A prefix of the uuid is enough to pin and to unpin."""
    manifest = commit_files(store)
    made = pin(store, manifest.uuid[:9], "figure 3", by="ann@here")
    assert pins(store) == {manifest.uuid: made}
    assert (made.uuid, made.reason, made.by) == (manifest.uuid, "figure 3", "ann@here")
    assert str(made) == "pinned by ann@here: figure 3"
    stored = store.storage.read(made.key) or b""
    assert b'"reason": "figure 3"' in stored  # readable by anything
    assert unpin(store, manifest.uuid[:9]) == made
    assert pins(store) == {}


def test_a_second_pin_replaces_the_first(local_store: CheckpointStore) -> None:
    """The last reason given is shown."""
    manifest = commit_files(local_store)
    pin(local_store, manifest.uuid, "figure 3")
    second = pin(local_store, manifest.uuid, "figure 4")
    assert pins(local_store) == {manifest.uuid: second}


def test_an_unknown_uuid_is_refused(local_store: CheckpointStore) -> None:
    """To pin and to unpin; the error lists what there is."""
    manifest = commit_files(local_store)
    with pytest.raises(CheckpointNotFound, match="begins with 'abc'"):
        pin(local_store, "abc")
    pin(local_store, manifest.uuid)
    with pytest.raises(CheckpointNotFound, match=f"begin with 'abc': {manifest.uuid}"):
        unpin(local_store, "abc")


def test_an_ambiguous_prefix_unpins_nothing(local_store: CheckpointStore) -> None:
    """The error lists the pins; a whole uuid is not ambiguous."""
    for name in ("aaaa-1", "aaaa-2"):
        empty = Protection(uuid=name, by="", at="")
        local_store.storage.write(empty.key, encode_json(empty))
    with pytest.raises(CheckpointNotFound, match=r"2 pinned checkpoints .*aaaa-1, aaaa-2"):
        unpin(local_store, "aaaa")
    assert unpin(local_store, "aaaa-2").uuid == "aaaa-2"
    assert list(pins(local_store)) == ["aaaa-1"]


def test_the_protections_of_a_checkpoint(local_store: CheckpointStore) -> None:
    """Its own alone, its pin first, then holds by model and move."""
    uuid, other = "aaaa-1", "bbbb-2"
    made = [
        Protection(uuid=uuid, kind="hold", model="b", version=2, move=1, by="", at="", unique="cd"),
        Protection(uuid=uuid, by="ann@here", at="", unique="ef"),
        Protection(uuid=uuid, kind="hold", model="a", move=7, by="", at="", unique="ab"),
        Protection(uuid=other, by="bob@there", at=""),
    ]
    for each in made:
        local_store.storage.write(each.key, encode_json(each))
    assert protections(local_store, uuid) == {uuid: [made[1], made[2], made[0]]}
    assert protected(local_store, uuid) == {
        uuid: "pinned by ann@here; held by model a, unreadable version; held by model b, version 2"
    }
    assert pins(local_store) == {uuid: made[1], other: made[3]}


def test_a_hold_is_not_a_pin(local_store: CheckpointStore) -> None:
    """It cannot be unpinned: the error says which model holds the checkpoint, and no others."""
    for name in ("aaaa-1", "bbbb-2"):
        held = Protection(
            uuid=name, kind="hold", model="m", version=1, move=1, by="", at="", unique="ab"
        )
        local_store.storage.write(held.key, encode_json(held))
    with pytest.raises(CheckpointNotFound) as refused:
        unpin(local_store, "aaaa")
    said = str(refused.value)
    assert "begin with 'aaaa': none is pinned; aaaa-1 is held by model m, version 1" in said
    assert "bbbb" not in said


@pytest.mark.parametrize("data", [b"", b"\xff", b'{"uuid": 3}'])
def test_an_unreadable_pin_counts(local_store: CheckpointStore, data: bytes) -> None:
    """The checkpoint was meant to stay."""
    manifest = commit_files(local_store)
    local_store.storage.write(ProtectionName(manifest.uuid).key, data)
    (decision,) = plan_pruning(local_store, KEEP_NONE, "gpt").decisions
    assert decision.keep
    assert "cannot be read" in decision.why


def test_a_checkpoint_that_is_being_deleted_cannot_be_pinned(local_store: CheckpointStore) -> None:
    """No pin is left, but an earlier pin stays."""
    manifest = commit_files(local_store)
    mark_deletion(local_store, manifest)
    with pytest.raises(CommitConflict, match=r"is being deleted, by .*@"):
        pin(local_store, manifest.uuid)
    assert pins(local_store) == {}
    local_store.storage.write(ProtectionName(manifest.uuid).key, b"an older pin")
    with pytest.raises(CommitConflict):
        pin(local_store, manifest.uuid)
    assert list(pins(local_store)) == [manifest.uuid]


def test_a_stale_deletion_does_not_prevent_a_pin(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pruner died, and the checkpoint is still there."""
    manifest = commit_files(local_store)
    mark_deletion(local_store, manifest)
    at = datetime.now(timezone.utc) + timedelta(hours=2)
    monkeypatch.setattr(Storage, "now", lambda self: at)
    pin(local_store, manifest.uuid)
    assert list(pins(local_store)) == [manifest.uuid]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_pin_during_a_prune(step: int) -> None:
    """In any order of requests a pin that succeeded holds, and a listed checkpoint is complete."""
    is_pinned = {
        pin_and_prune([False] * first + [True] * second + [False] * more + [True] * 9)
        for first, second, more in itertools.product(
            range(0, 8, step), range(0, 11, step), (1, 9) if step > 1 else (1, 2, 3, 9)
        )
    }
    assert is_pinned == {True, False}


def pin_and_prune(order: list[bool]) -> bool:
    """Pin and prune a checkpoint in this order of requests; whether the pin succeeded."""
    url = f"memory://{uuid.uuid4()}"
    store = CheckpointStore(url)
    manifest = commit_files(store)
    plan = plan_pruning(store, KEEP_NONE, "gpt")
    pinned, pruned = interleave(
        url, partial(pin, uuid=manifest.uuid), partial(prune, plan=plan), order
    )
    is_listed = store.list() == [manifest]
    assert not isinstance(pruned, Exception), pruned
    assert is_listed == bool(store.storage.sizes(layout.files_folder(manifest.uuid)))
    assert store.storage.sizes(layout.DELETIONS) == {}
    if isinstance(pinned, Protection):
        assert is_listed
        assert list(pins(store)) == [manifest.uuid]
        assert [decision.why for decision in pruned.spared] == [str(pinned)]
        return True
    assert isinstance(pinned, (CheckpointNotFound, CommitConflict))
    assert pins(store) == {}
    return False


def test_a_refused_pin_removes_no_other_pin() -> None:
    """Of two people who pin while a prune begins, one is refused; the other's pin stays."""
    url = f"memory://{uuid.uuid4()}"
    store = CheckpointStore(url)
    manifest = commit_files(store)
    pinned, _, refused = interleave_all(
        url,
        [
            partial(pin, uuid=manifest.uuid, by="ann@here"),
            partial(mark_deletion, manifest=manifest),
            partial(pin, uuid=manifest.uuid, by="bob@there"),
        ],
        # Bob has looked for a pin, Ann pins, the prune begins, Bob goes on.
        [2, 2, *[0] * 12, 1, *[2] * 12],
    )
    assert isinstance(refused, CommitConflict)
    assert pins(store) == {manifest.uuid: pinned}
