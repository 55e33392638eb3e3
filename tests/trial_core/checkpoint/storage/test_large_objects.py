"""An object that is read whole has a size limit, and a larger one is refused by its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.manifests import commit_files, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.storage import base
from trial_core.checkpoint.storage.base import MAX_OBJECT_BYTES
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, RegistryError
from trial_core.models.journal import Journal, StageRecord
from trial_core.models.registry import Registry
from trial_core.observe.ledger.stored_ledger import read_ledger

LIMIT_BYTES = 5_000
TOO_LARGE = b"{}".ljust(LIMIT_BYTES + 1)


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_OBJECT_BYTES", LIMIT_BYTES)


def write_sparse(store: CheckpointStore, key: str) -> None:
    """An object that is larger than any memory, and takes no space."""
    path = Path(store.url.removeprefix("file://"), key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, 2**42)


@pytest.mark.usefixtures("low_limit")
def test_the_limit_is_the_last_size_that_is_read(store: CheckpointStore) -> None:
    """One byte more is refused. It exists all the same, and a create does not overwrite it."""
    for size_bytes in (0, LIMIT_BYTES):
        store.storage.write("a", bytes(size_bytes))
        assert store.storage.read("a") == bytes(size_bytes)
    store.storage.write("a", TOO_LARGE)
    with pytest.raises(CheckpointDamaged, match=rf"{store.url}/a has more than 5,000 bytes.*del"):
        store.storage.read("a")
    assert store.storage.exists("a")
    with pytest.raises(FileExistsError):
        store.storage.create("a", b"{}")
    store.storage.remove("a")
    assert not store.storage.exists("a")


def test_no_more_is_read_than_asked(store: CheckpointStore) -> None:
    """An object may be larger than the memory."""
    store.storage.write("a", b"0123456789")
    for size_bytes in (1, 7, 10, 11):
        read = store.storage._get(store.storage._path("a"), size_bytes)
        assert read == b"0123456789"[:size_bytes]


def test_an_object_larger_than_memory_is_refused(local_store: CheckpointStore) -> None:
    """No more of it is read than the limit."""
    write_sparse(local_store, "a")
    with pytest.raises(CheckpointDamaged, match=rf"/a has more than {MAX_OBJECT_BYTES:,} bytes"):
        local_store.storage.read("a")


@pytest.mark.usefixtures("low_limit")
def test_a_manifest_that_is_too_large_is_not_listed(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are. Who asks for it gets an error that names it."""
    kept = commit_files(local_store, 7, files={})
    name = new_manifest(9).name
    local_store.storage.write(name.key, TOO_LARGE)
    assert local_store.list() == local_store.resume_candidates(kept.trial) == [kept]
    assert local_store.newest(kept.trial) == kept
    assert f"a checkpoint is not listed: {local_store.url}/{name.key} has more" in caplog.text
    with pytest.raises(CheckpointDamaged, match=name.key):
        local_store.open(name.uuid)


def test_a_manifest_that_would_not_be_read_is_not_committed(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one whose deletion marker would not be read."""
    manifest = new_manifest(9)
    monkeypatch.setattr(
        "trial_core.checkpoint.manifest.MAX_MANIFEST_BYTES", len(manifest.to_json()) - 1
    )
    with pytest.raises(CheckpointDamaged, match=r"has .* bytes, expected at most .* fewer files"):
        local_store.commit(manifest)
    assert local_store.list() == []


@pytest.mark.usefixtures("low_limit")
def test_a_too_large_manifest_is_not_swept(local_store: CheckpointStore) -> None:
    """It counts as committed: it is no tombstone."""
    name = new_manifest(9).name
    local_store.announce_upload(name.trial, name.uuid, "one")
    local_store.storage.write(name.key, TOO_LARGE)
    assert local_store.sweep(name.trial) == []
    assert local_store.storage.exists(name.key)


@pytest.mark.usefixtures("low_limit")
def test_a_too_large_record_of_the_registry_is_named(local_store: CheckpointStore) -> None:
    """The registry and a retraining stop: they cannot do without it."""
    log = layout.numbered_key(layout.versions_folder("gpt"), 1)
    journal = layout.retraining_key("gpt", "run", "told.json")
    for key in (log, journal):
        local_store.storage.write(key, TOO_LARGE)
    with pytest.raises(RegistryError, match=rf"{log} cannot be read: .*{log} has more than"):
        Registry(local_store).versions("gpt")
    with pytest.raises(RegistryError, match=rf"{journal} cannot be read: .* has more than"):
        Journal(local_store, "gpt", "run").read("told", StageRecord)


@pytest.mark.usefixtures("low_limit")
def test_a_too_large_record_of_the_ledger_is_named(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of the ledger is read."""
    key = layout.numbered_key(layout.ledger_folder("t"), 1)
    local_store.storage.write(key, TOO_LARGE)
    assert read_ledger(local_store, "t").runs == ()
    assert f"the ledger lacks a run: {local_store.url}/{key} has more than" in caplog.text
