"""Holds: what is champion, or was before, stays whoever prunes, at whatever moment."""

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
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, PromotionConflict, PromotionRefused
from trial_core.models.records import Move
from trial_core.models.registry import Registry
from trial_core.retention.deletions import mark_deletion
from trial_core.retention.holds import holds
from trial_core.retention.pins import pin, pins, unpin
from trial_core.retention.pruning import plan_pruning, prune


def test_champion_and_previous_outlive_every_rule(store: CheckpointStore) -> None:
    """On every kind of storage, after promotions and a rollback; what is neither goes."""
    registry = new_registry(store, 4)
    for number in (1, 2, 3):
        registry.promote(MODEL, number)
    registry.rollback(MODEL)
    prune_all(store)
    assert aliases(registry) == (2, 3)
    assert kept_versions(store) == {2, 3}


def test_a_plan_says_who_holds(local_store: CheckpointStore) -> None:
    """In the words that a person sees before anything is deleted."""
    new_registry(local_store, 2).promote(MODEL, 2)
    why = [decision.why for decision in plan_pruning(local_store, NOTHING, "gpt").decisions]
    assert why[1] == "held by model gpt, version 2"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"uuid": 3}'])
def test_a_hold_that_cannot_be_read_is_a_hold(local_store: CheckpointStore, data: bytes) -> None:
    """The registry meant the checkpoint to stay; a later move gives it up as any other."""
    registry = new_registry(local_store, 3)
    registry.promote(MODEL, 1)
    ((held,),) = holds(local_store).values()
    local_store.storage.write(held.key, data)
    prune_all(local_store)
    assert kept_versions(local_store) == {1}
    for batches in (4, 5):
        registry.promote(MODEL, register(local_store, commit(local_store, batches)).number)
    assert held_versions(registry) == {4, 5}


def test_a_persons_pin_is_another_thing(local_store: CheckpointStore) -> None:
    """To unpin takes nothing from the registry, nor does the registry take the pin."""
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


def test_what_is_only_held_cannot_be_unpinned(local_store: CheckpointStore) -> None:
    """It is said who holds it, and what sets it free."""
    registry = new_registry(local_store, 1)
    registry.promote(MODEL, 1)
    held = registry.version(MODEL, 1).checkpoint
    with pytest.raises(CheckpointNotFound, match="held by model gpt, version 1, and the registry"):
        unpin(local_store, held[:9])
    assert held_versions(registry) == {1}


def test_what_is_being_deleted_is_not_promoted(local_store: CheckpointStore) -> None:
    """It says who deletes it, and holds nothing."""
    registry = new_registry(local_store, 1)
    manifest = local_store.list()[0]
    mark_deletion(local_store, manifest)
    with pytest.raises(PromotionRefused, match=r"is being deleted, by .*@"):
        registry.promote(MODEL, 1)
    assert (aliases(registry), registry.held()) == ((None, None), {})


@pytest.mark.parametrize("begun", range(16))
def test_promote_and_prune_at_the_same_moment(begun: int) -> None:
    """In whatever order their requests come: who was promoted is there, whole, and held; and who
    was champion before stays. First so many requests of the promotion, then some of the prune."""
    for pruned, gone_on in itertools.product(range(10), (1, 2, 9)):
        _promote_and_prune([False] * begun + [True] * pruned + [False] * gone_on + [True] * 20)


def _promote_and_prune(order: list[bool]) -> bool:
    """Whether the promotion came first."""
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


def test_the_order_reaches_both_ends() -> None:
    """The test above can tell: there are orders in which the promotion wins, and others."""
    assert _promote_and_prune([False] * 40)
    assert not _promote_and_prune([True] * 40)


@pytest.mark.parametrize("begun", range(16))
def test_a_rollback_and_a_promotion_at_the_same_moment(begun: int) -> None:
    """One of them wins; who is champion then, and who was before, stays whatever is pruned."""
    for others, gone_on in itertools.product(range(5, 13), (1, 20)):
        with memory_store() as store:
            _roll_back_and_promote(
                store, [False] * begun + [True] * others + [False] * gone_on + [True] * 20
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
