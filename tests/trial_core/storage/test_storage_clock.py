"""Every storage tells when an object was written, and what time it is, by one clock."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.storage.base import PROBES, Storage, StoredObject


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
    real, shift = type(store.storage).objects, timedelta(minutes=minutes)

    def differing(self: Storage, folder: str) -> dict[str, StoredObject]:
        return {
            key: each._replace(modified_at=each.modified_at + shift)
            for key, each in real(self, folder).items()
            if each.modified_at is not None
        }

    monkeypatch.setattr(type(store.storage), "objects", differing)
    names = f"{re.escape(socket.gethostname())} says .*{re.escape(store.storage.url)} said .*NTP"
    with pytest.raises(StorageError, match=names):
        store.check_writable()
    assert store.storage.sizes(PROBES) == {}
    shift /= 6
    store.check_writable()
