"""The lock of plain objects: one at a time, and nobody waits for ever for one who died."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Plan
from tests.trial_core.models.helpers import MODEL, aliases, check_log, new_registry
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import PromotionConflict, StorageError
from trial_core.models import storage_lock
from trial_core.models.registry import Registry
from trial_core.models.storage_lock import locked

FOLDER = layout.locks_folder(MODEL)
OF_THE_DEAD = f"{FOLDER}/20010509T170400000000Z-0123.json"
OF_THE_LIVING = f"{FOLDER}/99990509T170400000000Z-0123.json"


@pytest.fixture
def other_store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store on a file system that is none of those that we know by name."""
    with planned(tmp_path.name, Plan()):
        yield CheckpointStore(f"faulty://{tmp_path.name}{tmp_path}/storage")


def test_one_at_a_time(other_store: CheckpointStore) -> None:
    """Of many threads no two are in the block at once, and each comes in."""
    inside, most, done = 0, 0, []
    guard = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        with locked(other_store.storage, FOLDER):
            with guard:
                inside += 1
                most = max(most, inside)
            other_store.storage.read("anything")
            with guard:
                inside -= 1
            done.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(18)))
    assert (most, sorted(done)) == (1, list(range(18)))
    assert other_store.storage.sizes(FOLDER) == {}


def test_a_lock_of_long_ago_keeps_nobody_out(other_store: CheckpointStore) -> None:
    """Its owner has died; who comes next removes it."""
    other_store.storage.write(OF_THE_DEAD, b"")
    with locked(other_store.storage, FOLDER):
        assert OF_THE_DEAD not in other_store.storage.sizes(FOLDER)


def test_one_waits_for_a_lock_of_now(
    other_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for ever: then it says who has it, and leaves nothing of its own."""
    monkeypatch.setattr(storage_lock, "LOCK_STALE", timedelta(seconds=0.2))
    other_store.storage.write(OF_THE_LIVING, b'{"by": "ann@here", "at": "noon"}')
    with (
        pytest.raises(StorageError, match=r"last ann@here since noon .*delete that object"),
        locked(other_store.storage, FOLDER),
    ):
        pass
    assert list(other_store.storage.sizes(FOLDER)) == [OF_THE_LIVING]


def test_who_is_late_writes_nothing(
    other_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have the lock by then."""
    registry = new_registry(other_store, 1)
    monkeypatch.setattr(storage_lock, "LOCK_STALE", timedelta(0))
    with pytest.raises(StorageError, match="nothing was written: since this process began"):
        registry.promote(MODEL, 1)
    assert registry.moves(MODEL) == []


def test_half_a_move_is_none(other_store: CheckpointStore) -> None:
    """As one leaves who dies while the storage shows what is being written: what held before holds
    still, and the next one takes its number."""
    registry = new_registry(other_store, 3)
    registry.promote(MODEL, 1)
    key = layout.numbered_key(layout.moves_folder(MODEL), 2)
    for half in (b"", b'{"number": 2, "model": "gp'):
        other_store.storage.write(key, half)
        assert aliases(registry) == (1, None)
    registry.promote(MODEL, 2)
    assert aliases(registry) == (2, 1)
    check_log(registry.moves(MODEL))


def test_half_a_version_is_none(other_store: CheckpointStore) -> None:
    """As with moves: no number is left out."""
    registry = new_registry(other_store, 1)
    key = layout.numbered_key(layout.versions_folder(MODEL), 2)
    other_store.storage.write(key, b'{"number": 2, "model": "gp')
    new_registry(other_store, 1)
    assert [version.number for version in registry.versions(MODEL)] == [1, 2]


def test_half_a_move_where_none_can_be(local_store: CheckpointStore) -> None:
    """Somebody has changed it: who promotes is told to delete it, and nothing is guessed."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    local_store.storage.write(layout.numbered_key(layout.moves_folder(MODEL), 2), b'{"n')
    with pytest.raises(PromotionConflict, match="half a one: delete it"):
        Registry(local_store).promote(MODEL, 2)
    assert aliases(registry) == (1, None)
