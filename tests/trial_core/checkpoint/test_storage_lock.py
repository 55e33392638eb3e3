"""The lock made of plain objects."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.support.storage_clock import shift_clock
from trial_core.checkpoint import layout, storage_lock
from trial_core.checkpoint.storage_lock import locked
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

FOLDER = layout.trial_locks_folder("t")
STALE = f"{FOLDER}/20010509T170400000000Z-0123.json"
HELD = f"{FOLDER}/99990509T170400000000Z-0123.json"


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


@pytest.mark.parametrize("minutes", [-3, 3])
def test_a_clock_that_differs_takes_no_lock(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Others may ignore its lock, or it theirs: also without a run, as when a champion is moved."""
    shift_clock(monkeypatch, unknown_store.storage, timedelta(minutes=minutes))
    with (
        pytest.raises(StorageError, match="set the wrong one"),
        locked(unknown_store.storage, FOLDER),
    ):
        pass
    assert unknown_store.storage.sizes(FOLDER) == {}


def test_a_foreign_object_is_named_once(
    unknown_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It blocks nothing, and stays."""
    foreign = f"{FOLDER}/notes.txt"
    unknown_store.storage.write(foreign, b"x")
    with locked(unknown_store.storage, FOLDER):
        pass
    assert caplog.text.count(f"{unknown_store.url}/{foreign} is ignored") == 1
    assert list(unknown_store.storage.sizes(FOLDER)) == [foreign]


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


def test_a_release_is_tried_again(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that stays would block its own process's next write for 10 minutes."""
    remove, failures = unknown_store.storage.remove, iter([StorageError("no answer")])

    def failing_once(key: str) -> None:
        for failure in failures:
            raise failure
        remove(key)

    monkeypatch.setattr(unknown_store.storage, "remove", failing_once)
    with locked(unknown_store.storage, FOLDER):
        pass
    assert unknown_store.storage.sizes(FOLDER) == {}
