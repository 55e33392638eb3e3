"""Folders of a storage that are symbolic links: what is behind one is neither lost nor deleted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.manifests import commit_files, put_files
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.claims import RunClaim, claims
from trial_core.checkpoint.retention.leftovers import find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.pruning import delete_checkpoint
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, StorageError

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


@pytest.mark.parametrize(
    "ask", [CheckpointStore.list, lambda store: store.storage.clear("manifests")]
)
def test_folders_that_are_too_deep_are_refused(
    local_store: CheckpointStore, root: Path, ask: Callable[[CheckpointStore], object]
) -> None:
    """A program that may write there makes them; neither a listing nor a deletion is a crash."""
    root.mkdir()
    folders = [f"{root}/manifests{'/a' * depth}" for depth in range(1200)]
    for each in folders:
        os.mkdir(each)
    try:
        with pytest.raises(StorageError):
            ask(local_store)
    finally:
        for each in reversed(folders):  # what pytest cannot delete
            os.rmdir(each)


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


CHANGES: dict[str, Callable[[Storage, str, Path], object]] = {
    "write": lambda storage, key, file: storage.write(key, b"theirs"),
    "create": lambda storage, key, file: storage.create(f"{key}.new", b"theirs"),
    "upload": lambda storage, key, file: storage.upload(file, key, CancelSignal()),
    "delete": lambda storage, key, file: storage.delete(key),
    "remove": lambda storage, key, file: storage.remove(key),
    "clear": lambda storage, key, file: storage.clear(key.rpartition("/")[0]),
}


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/one"])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_changed_behind_a_link(
    local_store: CheckpointStore, root: Path, tmp_path: Path, change: str, link: str
) -> None:
    """Who may write to a shared folder could link it to any folder of another user."""
    own = tmp_path / "home" / "more/own.txt"
    if link == "checkpoints":
        own = tmp_path / "home" / "one/more/own.txt"
    own.parent.mkdir(parents=True)
    own.write_text("own")
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(tmp_path / "home")
    (tmp_path / "file").write_bytes(b"theirs")
    with pytest.raises(StorageError, match="nothing is written or deleted behind"):
        CHANGES[change](local_store.storage, "checkpoints/one/more/own.txt", tmp_path / "file")
    assert own.read_text() == "own"
    assert [each.name for each in own.parent.iterdir()] == ["own.txt"]


def test_an_intent_for_a_folder_of_the_user_deletes_nothing(
    local_store: CheckpointStore, root: Path, tmp_path: Path
) -> None:
    """The next run of the trial would sweep it, without a question."""
    own = tmp_path / "home" / "Documents" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.touch()
    local_store.announce_upload(TRIAL, "Documents", "one", local_store.take_over(TRIAL, "one"))
    (root / "checkpoints").symlink_to(tmp_path / "home")
    with pytest.raises(StorageError, match="nothing is written or deleted behind"):
        local_store.sweep(TRIAL, local_store.take_over(TRIAL, "two"))
    assert own.exists()


def test_a_pipe_in_a_storage_is_refused(local_store: CheckpointStore, root: Path) -> None:
    """Its reader would wait for ever."""
    saved = commit_files(local_store, 7, trial=TRIAL)
    keys = [saved.name.key, saved.files[0].key(saved.uuid)]
    for key in keys:
        (root / key).unlink()
        os.mkfifo(root / key)
    writers = [os.open(root / key, os.O_RDWR) for key in keys]  # a reader gets past its open
    try:
        with pytest.raises(CheckpointDamaged, match="is a pipe or a device"):
            local_store.storage.read(keys[0])
        with pytest.raises(CheckpointDamaged, match="is a pipe or a device"):
            local_store.storage.read_into(keys[1], 0, memoryview(bytearray(1)), CancelSignal())
    finally:
        for each in writers:
            os.close(each)
    assert local_store.list() == []


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
    with nullcontext() if link else pytest.raises(StorageError, match="behind one"):
        delete_checkpoint(local_store, saved)
    assert [each.exists() for each in own] == [True, True]
