"""Stored files that a checkpoint needs stay, also where a manifest or an intent is unreadable."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from tests.trial_core.checkpoint.retention.test_shared_files import (
    FROZEN,
    TRIAL,
    pass_time,
    references,
    save,
)
from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import read_intent
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.leftovers import find_orphaned_files, sweep_orphaned_files
from trial_core.checkpoint.retention.pruning import delete_checkpoint
from trial_core.checkpoint.retention.shared_files import announce_shared_upload
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError

logger = logging.getLogger(__name__)


@pytest.fixture
def deleted(local_store: CheckpointStore, tmp_path: Path) -> Manifest:
    """A deleted checkpoint, whose files a later one refers to."""
    first = save(local_store, tmp_path, 7)
    save(local_store, tmp_path, 11)
    local_store.delete(first)
    return first


def test_a_sweep_takes_nothing_that_an_unreadable_manifest_may_need(
    local_store: CheckpointStore, deleted: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    """The intent stays too, so that a later sweep finds the files."""
    (second,) = local_store.list()
    local_store.announce_upload(TRIAL, deleted.uuid, "attempt")
    local_store.storage.write(second.name.key, b"{")
    assert CheckpointStore(local_store.url).sweep(TRIAL) == []  # it has read no manifest
    assert f"leftovers of checkpoint {deleted.uuid} stay" in caplog.text
    local_store.storage.write(second.name.key, second.to_json())
    assert local_store.verify(second.uuid) == second
    assert [each.uuid for each in local_store.sweep(TRIAL)] == [deleted.uuid]
    assert local_store.verify(second.uuid) == second


def test_no_file_is_orphaned_while_a_manifest_is_unreadable(
    local_store: CheckpointStore, deleted: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of files that an earlier search has found looks again."""
    age = timedelta(days=7)
    (second,) = local_store.list()
    pass_time(monkeypatch, timedelta(days=30))
    local_store.storage.write(layout.file_key(deleted.uuid, "junk"), b"junk")
    assert [each.uuid for each in find_orphaned_files(local_store, age)] == [deleted.uuid]
    later = CheckpointStore(local_store.url)  # has read no manifest
    later.storage.write(second.name.key, b"{")
    assert find_orphaned_files(later, age) == []
    assert sweep_orphaned_files(later, deleted.uuid, age) is None
    later.storage.write(second.name.key, second.to_json())
    assert later.verify(second.uuid) == second


def test_a_checkpoint_that_is_committed_during_a_search_counts(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first list of manifests does not show it."""
    first, sizes = save(local_store, tmp_path, 7), local_store.storage.sizes
    saved: list[Manifest] = []

    def list_then_save(folder: str) -> dict[str, int]:
        listed = sizes(folder)
        if folder == layout.trial_folder(TRIAL) and not saved:
            saved.append(save(CheckpointStore(local_store.url), tmp_path, 11))
        return listed

    monkeypatch.setattr(local_store.storage, "sizes", list_then_save)
    needed = local_store.references(TRIAL).keys
    assert needed == {layout.file_key(first.uuid, path) for path in FROZEN}
    assert references(saved[0]) == set(FROZEN)


def test_the_note_of_a_damaged_file_stays_with_the_file(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Its checkpoint is deleted; the next save stores the content anew."""
    first, _, second = [save(local_store, tmp_path, batches) for batches in (7, 11, 12)]
    path = "base/frozen weights.pt"
    local_store.storage.write(layout.file_key(first.uuid, path), b"X" + FROZEN[path][1:])
    with pytest.raises(CheckpointDamaged, match="has digest"):
        local_store.verify(second.uuid)
    local_store.delete(first)
    third = save(local_store, tmp_path, 13)
    assert {file.path for file in third.files if file.stored_at} == set(FROZEN) - {path}
    assert local_store.verify(third.uuid) == third


def test_an_unreadable_intent_may_name_any_checkpoint(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """No checkpoint of its trial is deleted, also not by a script."""
    first, second = save(local_store, tmp_path, 7), save(local_store, tmp_path, 11)
    local_store.storage.write(layout.intent_key(TRIAL, "new"), b"{")
    for each in (first, second):
        with pytest.raises(CheckpointError, match="checkpoint new, whose upload has begun, may"):
            delete_checkpoint(local_store, each)
    assert len(local_store.list()) == 2


def test_a_retry_names_its_new_base(local_store: CheckpointStore, tmp_path: Path) -> None:
    """A checkpoint that was committed since is the base, and is not deleted."""
    first = save(local_store, tmp_path, 7)
    assert announce_shared_upload(local_store, TRIAL, "new", "a", None, logger)[0] == first.uuid
    second = save(local_store, tmp_path, 11)
    assert announce_shared_upload(local_store, TRIAL, "new", "a", None, logger)[0] == second.uuid
    intent = read_intent(local_store.storage, TRIAL, "new")
    assert intent is not None
    assert intent.base == second.uuid
    with pytest.raises(CheckpointError, match="checkpoint new, whose upload has begun, may"):
        delete_checkpoint(local_store, second)


def test_a_checkpoint_whose_own_files_are_gone_is_no_base(
    local_store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its upload was swept, and its commit is about to fail: what it refers to is stored anew."""
    _, _, second = [save(local_store, tmp_path, batches) for batches in (7, 11, 12)]
    local_store.storage.remove(layout.file_key(second.uuid, "adapter.pt"))
    base, shared = announce_shared_upload(local_store, TRIAL, "new", "a", None, logger)
    assert (base, shared) == (second.uuid, [])
    assert "not whole" not in caplog.text
