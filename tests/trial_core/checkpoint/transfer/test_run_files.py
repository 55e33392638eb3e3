from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.run_files import RunFiles, rank_folder, tensorboard_url
from trial_core.errors import StorageError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "storage"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "deeper").mkdir(parents=True)
    (folder / "events").write_text("one")
    (folder / "deeper" / "trace.json").write_text("{}")
    return folder


@pytest.fixture
def files(store: CheckpointStore, folder: Path, tmp_path: Path) -> RunFiles:
    return RunFiles(store, "toy-1", folder, rank_folder(3), tmp_path / "scratch")


def stored(tmp_path: Path) -> dict[str, str]:
    root = tmp_path / "storage" / "runs" / "toy-1" / "tensorboard" / "rank-3"
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_only_new_and_changed_files_are_uploaded(
    files: RunFiles, folder: Path, tmp_path: Path
) -> None:
    """First all files, then none, then the file that grew and a new one."""
    assert files.upload_changed() == 2
    assert stored(tmp_path) == {"events": "one", "deeper/trace.json": "{}"}
    assert files.upload_changed() == 0
    (folder / "events").write_text("one two")
    (folder / "new").write_text("three")
    assert files.upload_changed() == 2
    assert stored(tmp_path) == {"events": "one two", "deeper/trace.json": "{}", "new": "three"}


def test_the_scratch_folder_is_left_empty(files: RunFiles, tmp_path: Path) -> None:
    """Temporary copies are deleted."""
    files.upload_changed()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_missing_folder_has_no_files(store: CheckpointStore, tmp_path: Path) -> None:
    """A rank that wrote no files uploads none."""
    nowhere = RunFiles(store, "toy-1", tmp_path / "nowhere", "tensorboard", tmp_path / "scratch")
    assert nowhere.upload_changed() == 0


def test_files_of_a_failed_upload_are_uploaded_later(
    files: RunFiles, folder: Path, tmp_path: Path
) -> None:
    """The next upload includes every file that was not stored."""
    (tmp_path / "storage").write_text("in the way")
    with pytest.raises(StorageError):
        files.upload_changed()
    (tmp_path / "storage").unlink()
    assert files.upload_changed() == 2
    assert stored(tmp_path) == {"events": "one", "deeper/trace.json": "{}"}


def test_links_are_not_followed(files: RunFiles, folder: Path, tmp_path: Path) -> None:
    """Files outside the folder are not uploaded."""
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    files.upload_changed()
    assert "link" not in stored(tmp_path)


def test_the_url_of_a_trials_event_files(store: CheckpointStore, tmp_path: Path) -> None:
    """The URL to give to TensorBoard."""
    assert tensorboard_url(store, "toy-1") == f"file://{tmp_path}/storage/runs/toy-1/tensorboard"
