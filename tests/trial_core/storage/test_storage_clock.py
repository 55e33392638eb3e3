"""Every storage tells when an object was written, and what time it is, by one clock."""

from __future__ import annotations

from datetime import timedelta

from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.base import PROBES


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
