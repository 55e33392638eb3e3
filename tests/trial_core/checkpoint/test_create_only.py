"""Create-only writes on a storage without conditional writes."""

from __future__ import annotations

import itertools
import uuid as uuids
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.faults.s3 import faulty_s3
from tests.support.interleaving import interleave, then_in_turns
from tests.support.s3 import S3Server
from trial_core.checkpoint import layout, storage_lock
from trial_core.checkpoint.create_only import create_only
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

LOCKS = layout.trial_locks_folder("t")
KEY = layout.attempt_key("t", 1)


class AfterASuspend(datetime):
    """The clock of a machine that was suspended for 20 minutes."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(minutes=20)


def test_the_first_writer_succeeds(unknown_store: CheckpointStore) -> None:
    """And may repeat its write. No lock is left."""
    storage = unknown_store.storage
    for _ in range(2):
        create_only(storage, KEY, b"1", LOCKS)
    with pytest.raises(FileExistsError, match=KEY):
        create_only(storage, KEY, b"2", LOCKS)
    assert storage.read(KEY) == b"1"
    assert storage.sizes(LOCKS) == {}


def test_an_incomplete_object_is_replaced(unknown_store: CheckpointStore) -> None:
    """Its writer no longer has the lock."""
    unknown_store.storage.write(KEY, b'{"number": ')
    create_only(unknown_store.storage, KEY, b"2", LOCKS)
    assert unknown_store.storage.read(KEY) == b"2"


def test_nothing_is_written_under_an_expired_lock(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may ignore it by then."""
    monkeypatch.setattr(storage_lock, "LOCK_STALE", timedelta(0))
    with pytest.raises(StorageError, match=f"{KEY} is not written: the lock "):
        create_only(unknown_store.storage, KEY, b"1", LOCKS)
    assert unknown_store.storage.read(KEY) is None


def test_a_write_that_outlasts_its_lock_is_an_error(
    unknown_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended machine's write may replace that of the lock's next owner, which lives on."""
    storage, create = unknown_store.storage, unknown_store.storage.create

    def create_late(key: str, data: bytes) -> None:
        monkeypatch.setattr(storage_lock, "datetime", AfterASuspend)
        create(key, data)

    monkeypatch.setattr(storage, "create", create_late)
    with pytest.raises(StorageError, match=f"{KEY} may be written, too late: the lock .* 1200 s"):
        create_only(storage, KEY, b"1", LOCKS)


@pytest.mark.usefixtures("memory_without_conditions")
def test_two_take_overs_without_conditional_writes() -> None:
    """In any order of requests they get two numbers, and one of the two may commit."""
    for first, second in itertools.product(range(9), range(12)):
        store = CheckpointStore(f"memory://{uuids.uuid4()}")
        order = then_in_turns([False] * first + [True] * second + [False] * 9)
        taken = interleave(
            store.url, lambda s: s.take_over("t", "one"), lambda s: s.take_over("t", "two"),
            order,
        )  # fmt: skip
        fences = [Fence(store.storage, fence.record) for fence in taken]
        assert sorted(fence.number for fence in fences) == [1, 2]
        assert [fence.number for fence in fences if fence.is_newest()] == [2]
        MemoryFileSystem.store.clear()


@pytest.mark.long
def test_concurrent_take_overs_of_a_server_that_ignores_the_condition(moto_s3: S3Server) -> None:
    """Each gets another number, and one attempt may commit."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        url = server.new_bucket()
        stores = [CheckpointStore(url, server.options) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            fences = list(pool.map(lambda store: store.take_over("t", "attempt"), stores))
        assert sorted(fence.number for fence in fences) == [1, 2, 3, 4]
        assert [fence.number for fence in fences if fence.is_newest()] == [4]
