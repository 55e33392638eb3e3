"""Folders of a storage that are symbolic links: what is behind one is neither lost nor deleted."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.manifests import commit_files, put_files
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.claims import RunClaim, claims
from trial_core.checkpoint.retention.leftovers import find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.pruning import delete_checkpoint
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

TRIAL = "gpt-0123abcd"


@pytest.fixture(autouse=True)
def much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the storage's clock, everything was written 30 days ago."""
    at = datetime.now(timezone.utc) + timedelta(days=30)
    monkeypatch.setattr(Storage, "now", lambda self: at)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a storage."""
    return tmp_path / "store"


@pytest.fixture
def local_store(root: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{root}")


def moved(folder: Path) -> Path:
    """Move a folder elsewhere, with a link in its place."""
    target = Path(*folder.parts[: folder.parts.index("store")], "disk")
    folder.rename(target)
    folder.symlink_to(target)
    return target


@pytest.mark.parametrize("folder", [f"manifests/{TRIAL}", "manifests", "checkpoints"])
def test_a_prune_keeps_committed_files(
    local_store: CheckpointStore, root: Path, folder: str
) -> None:
    """The manifests of all trials are found, also behind a link."""
    saved = commit_files(local_store, 7, trial=TRIAL)
    moved(root / folder)
    assert local_store.list() == local_store.list(TRIAL) == [saved]
    assert find_leftovers(local_store) == []
    assert local_store.find_damage(saved.uuid, saved.files) == []


def test_a_prune_keeps_an_upload_whose_intent_is_behind_a_link(
    local_store: CheckpointStore, root: Path
) -> None:
    """It is a leftover of its trial, not files of an unknown one."""
    fence = local_store.take_over(TRIAL, "one")
    begun = put_files(local_store, 11, trial=TRIAL)
    local_store.announce_upload(TRIAL, begun.uuid, "one", fence)
    moved(root / "uploads" / TRIAL)
    (found,) = find_leftovers(local_store)
    assert (found.trial, found.keep) == (TRIAL, True)


@pytest.mark.parametrize("folder", [f"manifests/{TRIAL}", "manifests"])
def test_a_link_that_leads_nowhere_stops_the_sweep(
    local_store: CheckpointStore, root: Path, folder: str
) -> None:
    """A disk that is not mounted is no storage without checkpoints."""
    saved = commit_files(local_store, 7, trial=TRIAL)
    target = moved(root / folder)
    away = target.rename(target.with_name("away"))
    for look in (local_store.list, lambda: local_store.list(TRIAL)):
        with pytest.raises(StorageError, match="leads nowhere: mount its disk"):
            look()
    with pytest.raises(StorageError, match="leads nowhere: mount its disk"):
        find_leftovers(local_store)
    away.rename(target)
    assert local_store.find_damage(saved.uuid, saved.files) == []


def test_a_link_to_a_folder_above_it_is_refused(local_store: CheckpointStore, root: Path) -> None:
    """A listing of it would not end."""
    commit_files(local_store, 7, trial=TRIAL)
    (root / "manifests" / "again").symlink_to(root / "manifests")
    with pytest.raises(StorageError, match="leads back"):
        local_store.list()


@pytest.mark.parametrize("link", ["", "/more"])
def test_a_deletion_goes_through_no_link(
    local_store: CheckpointStore, root: Path, tmp_path: Path, link: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The link goes, and the log says where the files are that stay."""
    begun = put_files(local_store, 11, trial=TRIAL)  # orphaned: no intent, no manifest
    if not link:
        moved(root / layout.files_folder(begun.uuid))
    else:
        (tmp_path / "disk").mkdir()
        (root / layout.files_folder(begun.uuid) / "more").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "own.txt").touch()
    (found,) = find_leftovers(local_store)
    with caplog.at_level(logging.WARNING):
        sweep_leftovers(local_store, [found])
    assert (tmp_path / "disk" / "own.txt").exists()
    assert not (root / layout.files_folder(begun.uuid)).exists()
    assert f"delete the files in {tmp_path / 'disk'}" in caplog.text


def test_a_link_to_files_that_are_needed_stays(local_store: CheckpointStore, root: Path) -> None:
    """Other checkpoints refer to what is behind it."""
    begun = put_files(local_store, 11, trial=TRIAL)
    moved(root / layout.files_folder(begun.uuid))
    kept = [layout.file_key(begun.uuid, file.path) for file in begun.files]
    with pytest.raises(StorageError, match="files that are still needed"):
        local_store.storage.clear(layout.files_folder(begun.uuid), kept)
    assert local_store.find_damage(begun.uuid, begun.files) == []


def test_a_claim_on_a_disk_that_is_not_mounted_is_not_missing(
    local_store: CheckpointStore, root: Path
) -> None:
    """Else the upload of a run that lives would be swept."""
    RunClaim(local_store, TRIAL).__enter__()
    target = moved(root / "claims")
    assert claims(local_store, TRIAL)
    target.rename(target.with_name("away"))
    with pytest.raises(StorageError, match="leads nowhere: mount its disk"):
        claims(local_store, TRIAL)


@pytest.mark.parametrize("link", ["", "/link"])
def test_beside_deletion_markers_nothing_is_deleted(
    local_store: CheckpointStore, root: Path, tmp_path: Path, link: str
) -> None:
    """Also where their folder is a link, or has one."""
    saved = commit_files(local_store, 7, trial=TRIAL)
    (tmp_path / "disk").mkdir()
    own = [tmp_path / "disk" / name for name in ("own.txt", "own.json")]
    for each in own:
        each.touch()
    place = root / f"{layout.deletions_folder(saved.uuid)}{link}"
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "disk")
    delete_checkpoint(local_store, saved)
    assert [each.exists() for each in own] == [True, True]
