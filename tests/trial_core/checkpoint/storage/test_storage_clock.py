"""Every storage tells when an object was written, and what time it is, by one clock."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest

from tests.support.storage_clock import shift_clock
from trial_core.checkpoint.storage.base import PROBES, Storage, StoredObject
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError


def test_a_new_object_is_young(store: CheckpointStore) -> None:
    """The probe that tells the time is deleted."""
    store.storage.write("folder/object", b"data")
    stored = store.storage.objects("folder")["folder/object"]
    now = store.storage.now()
    assert stored.size_bytes == 4
    assert stored.modified_at is not None
    assert now is not None
    # S3 counts whole seconds.
    assert timedelta(0) <= now - stored.modified_at < timedelta(minutes=5)
    assert store.storage.sizes(PROBES) == {}


@pytest.mark.parametrize("minutes", [-3, 3])
def test_a_clock_that_differs_is_named(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Before a run starts: the machine, the storage, and what to do. A minute is allowed."""
    shift_clock(monkeypatch, store.storage, timedelta(minutes=minutes))
    names = f"{re.escape(socket.gethostname())} says .*{re.escape(store.storage.url)} said .*NTP"
    with pytest.raises(StorageError, match=names):
        store.storage.check_usable()
    assert store.storage.sizes(PROBES) == {}
    with pytest.raises(StorageError, match=names):
        store.check_clock()
    shift_clock(monkeypatch, store.storage, timedelta(minutes=-minutes, seconds=10 * minutes))
    store.storage.check_usable()
    store.check_clock()


def test_the_clock_of_a_storage_that_cannot_be_written_is_not_compared(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint there can be evaluated."""

    def refuse(self: Storage, key: str, data: bytes) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(Storage, "write", refuse)
    local_store.check_clock()
    assert "is not compared" in caplog.text


def test_probes_of_killed_checks_are_deleted(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next check, once they are a week old by the storage's clock; not those of others."""
    store.storage.write(f"{PROBES}/of-a-killed-prune", b"")
    store.storage.check_usable()
    assert [*store.storage.sizes(PROBES)] == [f"{PROBES}/of-a-killed-prune"]
    real = type(store.storage).objects

    def aged(self: Storage, folder: str) -> dict[str, StoredObject]:
        return {
            key: each._replace(modified_at=each.modified_at - timedelta(days=7, minutes=1))
            if "killed" in key and each.modified_at is not None
            else each
            for key, each in real(self, folder).items()
        }

    monkeypatch.setattr(type(store.storage), "objects", aged)
    store.storage.check_usable()
    assert store.storage.sizes(PROBES) == {}
