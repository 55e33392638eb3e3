"""The mark that tells a storage from others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage_mark import marked, read_mark
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError


def test_all_runs_see_one_mark(store: CheckpointStore) -> None:
    """Also those that begin at the same time in an empty storage; it is never written again."""
    assert read_mark(store.storage) is None
    with ThreadPoolExecutor(4) as pool:
        marks = set(pool.map(lambda _: marked(store.storage), range(6)))
    assert marks == {read_mark(store.storage)}
    assert marked(CheckpointStore.from_spec(store.spec).storage, marks.pop())


def test_storages_have_different_marks(local_store: CheckpointStore) -> None:
    """The other one says which mark it has and which was expected, and is not marked by that."""
    mark = marked(local_store.storage)
    other = CheckpointStore(f"{local_store.url}/other")
    with pytest.raises(StorageError, match=f"has no {layout.MARK}, expected {mark}, and no record"):
        marked(other.storage, mark)
    assert read_mark(other.storage) is None
    theirs = marked(other.storage)
    with pytest.raises(StorageError, match=f"its mark is {theirs}, expected {mark}"):
        marked(other.storage, mark)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"id": 7}'])
def test_an_altered_mark_is_refused(local_store: CheckpointStore, data: bytes) -> None:
    """It is not overwritten: it may be a file of the user's."""
    local_store.storage.write(layout.MARK, data)
    with pytest.raises(StorageError, match=f"{layout.MARK} is not the mark of a storage"):
        marked(local_store.storage)
    assert local_store.storage.read(layout.MARK) == data
