"""Interrupted deletions are finished; deletions that never began are forgotten."""

from __future__ import annotations

import pytest

from tests.support.manifests import LONG_AGO, commit_files, keys_of, stored_keys
from trial_core.checkpoint.layout import DELETIONS, deletion_key
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.retention.deletion_markers import finish_deletions, mark_deletion


@pytest.fixture
def manifest(local_store: CheckpointStore) -> Manifest:
    """A committed checkpoint that is about to be deleted."""
    manifest = commit_files(local_store)
    mark_deletion(local_store, manifest)
    return manifest


def test_an_interrupted_deletion_is_finished(
    local_store: CheckpointStore, manifest: Manifest
) -> None:
    """Its manifest is deleted, its files are not yet: the next prune deletes them."""
    local_store.storage.delete(manifest.name.key)
    assert finish_deletions(local_store) == [manifest]
    assert stored_keys(local_store) | local_store.storage.sizes(DELETIONS).keys() == set()


def test_a_stale_marker_is_deleted(
    local_store: CheckpointStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pruner died before it deleted anything: the checkpoint stays."""
    assert finish_deletions(local_store) == []
    assert len(local_store.storage.sizes(DELETIONS)) == 1
    monkeypatch.setattr("trial_core.retention.deletion_markers.utc_now", lambda: LONG_AGO)
    mark_deletion(local_store, manifest)
    assert finish_deletions(local_store) == []
    assert local_store.storage.sizes(DELETIONS) == {}
    assert stored_keys(local_store) == keys_of([manifest])


def test_a_half_written_marker_is_deleted(local_store: CheckpointStore, manifest: Manifest) -> None:
    """Its pruner died before it deleted anything: the checkpoint stays."""
    local_store.storage.write(deletion_key(manifest.uuid), b'{"by": "ann')
    assert finish_deletions(local_store) == []
    assert local_store.storage.sizes(DELETIONS) == {}
    assert stored_keys(local_store) == keys_of([manifest])
