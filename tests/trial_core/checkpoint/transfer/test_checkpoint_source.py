"""A run continues from a checkpoint in another place than its storage."""

from __future__ import annotations

import uuid as uuids
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from tests.support.manifests import commit_files, commit_with_code, stored_keys
from tests.trial_core.checkpoint.retention.test_deletion_markers import clear_memory
from trial_core.checkpoint import layout
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import checkpoint_source
from trial_core.checkpoint.transfer.checkpoint_source import (
    copy_into,
    is_place,
    open_checkpoint,
    resume_manifest,
)
from trial_core.checkpoint.transfer.fetch import check_downloaded, download
from trial_core.driver.script_driver_main import _fixed
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    StorageError,
)


@pytest.fixture
def theirs(tmp_path: Path) -> CheckpointStore:
    """Another storage than the run's."""
    return CheckpointStore(f"file://{tmp_path}/theirs")


@pytest.fixture
def ours(tmp_path: Path) -> CheckpointStore:
    """The run's storage, without checkpoints."""
    return CheckpointStore(f"file://{tmp_path}/ours")


@pytest.mark.parametrize("by", ["url", "folder"])
def test_a_checkpoint_is_copied_to_the_runs_storage(
    ours: CheckpointStore, theirs: CheckpointStore, tmp_path: Path, by: str
) -> None:
    """With its files and its code, under its uuid, as committed by the run's attempt; once."""
    manifest = commit_with_code(theirs)
    place = theirs.files_url(manifest.uuid)
    if by == "folder":
        download(theirs, manifest.uuid, tmp_path / "downloaded")
        place = str(tmp_path / "downloaded")
    assert is_place(place)
    assert not is_place(manifest.uuid)
    assert resume_manifest(ours, place) == manifest
    fence = ours.take_over(manifest.trial, "mine")
    copied = copy_into(ours, place, fence)
    assert copied == msgspec.structs.replace(manifest, writer="mine")
    assert ours.verify(manifest.uuid) == copied
    assert copied.code is not None
    before = stored_keys(ours)
    assert copy_into(ours, place, fence) == resume_manifest(ours, place) == copied
    assert copy_into(ours, place, None) == copied
    assert stored_keys(ours) == before


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_called_damaged(
    theirs: CheckpointStore,
) -> None:
    """The run that saved it may live, and have a rule that deletes it."""
    manifest = commit_files(theirs)
    source = open_checkpoint(theirs.files_url(manifest.uuid))
    theirs.delete(manifest)
    with ExitStack() as stack, pytest.raises(CheckpointNotFound, match="been deleted meanwhile"):
        stack.enter_context(source.files(manifest.files))


def test_a_folder_at_the_root_is_not_looked_for_in_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a storage that is mounted at /checkpoints is taken for one of its own folders."""
    opened: list[str] = []

    def note(self: CheckpointStore, url: str, options: object) -> NoReturn:
        opened.append(url)
        raise StorageError("enough")

    monkeypatch.setattr(CheckpointStore, "__init__", note)
    with pytest.raises(StorageError, match="enough"):
        open_checkpoint(f"/checkpoints/{uuids.uuid4()}")
    assert opened == ["/"]


def test_a_damaged_download_is_not_copied(
    ours: CheckpointStore, theirs: CheckpointStore, tmp_path: Path
) -> None:
    """The error names the file, and nothing is committed."""
    manifest = commit_files(theirs)
    folder = tmp_path / "downloaded"
    download(theirs, manifest.uuid, folder)
    (folder / "mp_rank_00" / "model states.pt").write_bytes(b"other")
    with pytest.raises(CheckpointDamaged, match=r"model states.pt is missing or differs"):
        copy_into(ours, str(folder), ours.take_over(manifest.trial, "mine"))
    with pytest.raises(CheckpointNotFound):
        ours.open(manifest.uuid)


def test_a_download_that_changes_during_the_copy_is_not_committed(
    ours: CheckpointStore, theirs: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes alone would not tell."""
    manifest = commit_files(theirs)
    folder = tmp_path / "downloaded"
    download(theirs, manifest.uuid, folder)
    name = "mp_rank_00/model states.pt"

    def verify(*given: Any) -> None:
        check_downloaded(*given)
        (folder / name).write_bytes(b"MODEL" * 1000)

    monkeypatch.setattr(checkpoint_source, "check_downloaded", verify)
    with pytest.raises(CheckpointDamaged, match=f"is not copied: {name} changed meanwhile"):
        copy_into(ours, str(folder), ours.take_over(manifest.trial, "mine"))
    assert ours.list() == []


@pytest.mark.parametrize("lost", ["upload", "commit"])
def test_an_interrupted_copy_can_be_repeated(
    ours: CheckpointStore, theirs: CheckpointStore, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """By the same run, and by the next one, which first deletes what is left of it."""
    manifest = commit_with_code(theirs)
    place = theirs.files_url(manifest.uuid)
    fence = ours.take_over(manifest.trial, "first")

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise StorageError("lost")

    with monkeypatch.context() as broken:
        if lost == "upload":
            broken.setattr(checkpoint_source, "upload_staged", fail)
        else:
            broken.setattr(CheckpointStore, "commit", fail)
        with pytest.raises(StorageError):
            copy_into(ours, place, fence)
        with pytest.raises(StorageError):
            copy_into(ours, place, fence)
    fence = ours.take_over(manifest.trial, "second")
    (swept,) = ours.sweep(manifest.trial, fence)
    assert (swept.uuid, swept.files) == (manifest.uuid, 4 if lost == "commit" else 0)
    copied = copy_into(ours, place, fence)
    assert ours.verify(manifest.uuid) == copied
    assert copied.writer == "second"
    assert not ours.storage.sizes(layout.UPLOADS)


def test_a_checkpoint_that_is_not_in_the_runs_storage_is_refused_in_test_mode(
    ours: CheckpointStore, theirs: CheckpointStore
) -> None:
    """Test mode stores nothing, not even a copy."""
    place = theirs.files_url(commit_files(theirs).uuid)
    with pytest.raises(ConfigError, match=r"test_mode=True\) keeps no checkpoint"):
        copy_into(ours, place, None)
    assert stored_keys(ours) == set()


def test_a_url_of_the_same_protocol_uses_the_options_of_the_runs_storage() -> None:
    """Such as an endpoint. Other storages and other protocols do not get them."""
    options = {"endpoint": "there"}
    theirs = CheckpointStore(f"memory://{uuids.uuid4()}")
    place = theirs.files_url(commit_files(theirs).uuid)
    for beside, expected in (
        (CheckpointStore("memory://ours", options), options),
        (CheckpointStore("/ours", options), {}),
        (None, {}),
    ):
        found: Any = open_checkpoint(place, beside)
        assert found.place.spec.options == expected
    clear_memory()


def test_other_places_are_refused(ours: CheckpointStore, tmp_path: Path) -> None:
    """The error says what a place looks like."""
    with pytest.raises(CheckpointError, match=r"is no checkpoint: expected a folder with a"):
        resume_manifest(ours, str(tmp_path))
    with pytest.raises(CheckpointNotFound):
        resume_manifest(ours, f"{tmp_path}/missing")
    with pytest.raises(CheckpointError, match="is no checkpoint") as refusal:
        resume_manifest(ours, "ftp://ada:secret@host/folder")
    assert "secret" not in str(refusal.value)


def test_a_uuid_is_of_the_runs_own_storage(ours: CheckpointStore) -> None:
    """Nothing is copied, and no other storage is opened."""
    point = ResumePoint.continuing(commit_files(ours))
    choose = _fixed(str(point.uuid), point)
    assert choose is not None
    assert [*choose(ours, None)] == [point]
