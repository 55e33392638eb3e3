"""Holds: champion and previous are never pruned, even by a concurrent prune."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.support.interleaving import interleave
from tests.trial_core.models.helpers import (
    MODEL,
    NOTHING,
    aliases,
    check_log,
    commit,
    held_versions,
    kept_versions,
    memory_store,
    new_registry,
    prune_all,
    register,
)
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.retention.protections import pin, pins, protections, unpin
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, PromotionConflict, PromotionRefused
from trial_core.models.records import Move
from trial_core.models.registry import Registry

first_requests = pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[] if n in (3, 9) else pytest.mark.long) for n in range(16)],
)


def test_a_prune_plan_names_the_holder(local_store: CheckpointStore) -> None:
    """With model and version."""
    new_registry(local_store, 2).promote(MODEL, 2)
    why = [decision.why for decision in plan_pruning(local_store, NOTHING, "gpt").decisions]
    assert why[1] == "held by model gpt, version 2"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"uuid": 3}'])
def test_an_unreadable_hold_protects_too(local_store: CheckpointStore, data: bytes) -> None:
    """A later move removes it like any other."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    ((held,),) = protections(local_store, kind="hold").values()
    local_store.storage.write(held.key, data)
    prune_all(local_store)
    assert kept_versions(local_store) == {1}
    for batches in (4, 5):
        registry.promote(MODEL, register(local_store, commit(local_store, batches)).number)
    assert held_versions(registry) == {4, 5}


def test_pins_and_holds_are_independent(local_store: CheckpointStore) -> None:
    """Unpinning removes no hold, and the registry removes no pin."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    held = registry.version(MODEL, 1).checkpoint
    pin(local_store, held, "figure 3")
    unpin(local_store, held)
    prune_all(local_store)
    assert kept_versions(local_store) == {1}
    pin(local_store, held)
    for batches in (4, 5):
        registry.promote(MODEL, register(local_store, commit(local_store, batches)).number)
    assert list(pins(local_store)) == [held]
    assert held_versions(registry) == {4, 5}


def test_a_held_checkpoint_cannot_be_unpinned(local_store: CheckpointStore) -> None:
    """The error names the holder, and how to release the checkpoint."""
    registry = new_registry(local_store, 1)
    registry.promote(MODEL, 1)
    held = registry.version(MODEL, 1).checkpoint
    with pytest.raises(CheckpointNotFound, match="held by model gpt, version 1, and the registry"):
        unpin(local_store, held[:9])
    assert held_versions(registry) == {1}


def test_a_checkpoint_under_deletion_is_not_promoted(local_store: CheckpointStore) -> None:
    """The error names who deletes it; no hold is left."""
    registry = new_registry(local_store, 1)
    manifest = local_store.list()[0]
    mark_deletion(local_store, manifest)
    with pytest.raises(PromotionRefused, match=r"is being deleted, by .*@"):
        registry.promote(MODEL, 1)
    assert (aliases(registry), registry.held()) == ((None, None), {})


@first_requests
def test_promote_and_prune_at_once(first: int) -> None:
    """In any order of requests: a promoted version is intact and held, and the champion before it
    is kept. `first` requests of the promotion come first, then some of the prune."""
    for pruned, then in itertools.product(range(10), (1, 2, 9)):
        _promote_and_prune([False] * first + [True] * pruned + [False] * then + [True] * 20)


def _promote_and_prune(order: list[bool]) -> bool:
    """Whether the promotion succeeded."""
    with memory_store() as store:
        return _promote_and_prune_in(store, order)


def _promote_and_prune_in(store: CheckpointStore, order: list[bool]) -> bool:
    registry = new_registry(store, 2)
    registry.promote(MODEL, 1)
    plan = plan_pruning(store, NOTHING, "gpt")
    promoted, pruned = interleave(store.url, _promote, partial(prune, plan=plan), order)
    assert not isinstance(pruned, Exception)
    assert store.storage.sizes("deletions") == {}
    if isinstance(promoted, Move):
        assert aliases(registry) == (2, 1)
        assert kept_versions(store) == held_versions(registry) == {1, 2}
        return True
    assert isinstance(promoted, (CheckpointNotFound, PromotionRefused))
    assert aliases(registry) == (1, None)
    assert held_versions(registry) == {1}
    assert 1 in kept_versions(store)
    files = store.storage.sizes(layout.CHECKPOINTS)
    assert len(files) == len(kept_versions(store))
    return False


def _promote(store: CheckpointStore) -> Move:
    return Registry(store).promote(MODEL, 2)


def test_both_outcomes_occur() -> None:
    """The test above is meaningful: the promotion succeeds in some orders and fails in others."""
    assert _promote_and_prune([False] * 40)
    assert not _promote_and_prune([True] * 40)


@first_requests
def test_roll_back_and_promote_at_once(first: int) -> None:
    """In any order of requests: one succeeds, and champion and previous are not pruned."""
    for promoted, then in itertools.product(range(5, 13), (1, 20)):
        with memory_store() as store:
            _roll_back_and_promote(
                store, [False] * first + [True] * promoted + [False] * then + [True] * 20
            )


def _roll_back_and_promote(store: CheckpointStore, order: list[bool]) -> None:
    registry = new_registry(store, 3)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2)
    made = interleave(
        store.url,
        lambda own: Registry(own).rollback(MODEL),
        lambda own: Registry(own).promote(MODEL, 3),
        order,
    )
    prune_all(store)
    check_log(registry.moves(MODEL))
    assert all(isinstance(each, (Move, PromotionConflict)) for each in made)
    named = {each for each in aliases(registry) if each is not None}
    assert kept_versions(store) == held_versions(registry) == named
