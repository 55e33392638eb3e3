"""The lock made of plain objects, and the registry on a storage that needs it."""

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
STALE = f"{FOLDER}/20010509T170400000000Z-0123.json"
HELD = f"{FOLDER}/99990509T170400000000Z-0123.json"


@pytest.fixture
def unknown_store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store on an unknown file system: it has no conditional writes."""
    with planned(tmp_path.name, Plan()):
        yield CheckpointStore(f"faulty://{tmp_path.name}{tmp_path}/storage")


def test_one_owner_at_a_time(unknown_store: CheckpointStore) -> None:
    """Of many threads, each gets the lock, and no two at once."""
    inside, most, done = 0, 0, []
    guard = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        with locked(unknown_store.storage, FOLDER):
            with guard:
                inside += 1
                most = max(most, inside)
            unknown_store.storage.read("anything")
            with guard:
                inside -= 1
            done.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(18)))
    assert (most, sorted(done)) == (1, list(range(18)))
    assert unknown_store.storage.sizes(FOLDER) == {}


def test_a_stale_lock_is_ignored(unknown_store: CheckpointStore) -> None:
    """Its owner is dead; the next one deletes it."""
    unknown_store.storage.write(STALE, b"")
    with locked(unknown_store.storage, FOLDER):
        assert STALE not in unknown_store.storage.sizes(FOLDER)


def test_waiting_for_a_lock_ends(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the owner; nothing is left behind."""
    monkeypatch.setattr(storage_lock, "LOCK_STALE", timedelta(seconds=0.05))
    unknown_store.storage.write(HELD, b'{"by": "ann@here", "at": "noon"}')
    with (
        pytest.raises(StorageError, match=r"held by ann@here since noon .*delete that object"),
        locked(unknown_store.storage, FOLDER),
    ):
        pass
    assert list(unknown_store.storage.sizes(FOLDER)) == [HELD]


def test_nothing_is_written_under_an_expired_lock(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may ignore it by then."""
    registry = new_registry(unknown_store, 1)
    monkeypatch.setattr(storage_lock, "LOCK_STALE", timedelta(0))
    with pytest.raises(StorageError, match="nothing was written: the lock "):
        registry.promote(MODEL, 1)
    assert registry.moves(MODEL) == []


def test_an_incomplete_move_is_ignored(unknown_store: CheckpointStore) -> None:
    """The move before it is valid, and the next move takes its number."""
    registry = new_registry(unknown_store, 3)
    registry.promote(MODEL, 1)
    key = layout.numbered_key(layout.moves_folder(MODEL), 2)
    for incomplete in (b"", b'{"number": 2, "model": "gp'):
        unknown_store.storage.write(key, incomplete)
        assert aliases(registry) == (1, None)
    registry.promote(MODEL, 2)
    assert aliases(registry) == (2, 1)
    check_log(registry.moves(MODEL))


def test_an_incomplete_version_is_ignored(unknown_store: CheckpointStore) -> None:
    """The next version takes its number."""
    registry = new_registry(unknown_store, 1)
    key = layout.numbered_key(layout.versions_folder(MODEL), 2)
    unknown_store.storage.write(key, b'{"number": 2, "model": "gp')
    new_registry(unknown_store, 1)
    assert [version.number for version in registry.versions(MODEL)] == [1, 2]


def test_an_incomplete_move_on_a_storage_with_conditional_writes(
    local_store: CheckpointStore,
) -> None:
    """It was altered by hand: a promotion fails with the advice to delete it."""
    registry = new_registry(local_store, 2)
    registry.promote(MODEL, 1)
    local_store.storage.write(layout.numbered_key(layout.moves_folder(MODEL), 2), b'{"n')
    with pytest.raises(PromotionConflict, match="that object is incomplete: delete it"):
        Registry(local_store).promote(MODEL, 2)
    assert aliases(registry) == (1, None)
