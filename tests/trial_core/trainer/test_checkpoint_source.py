"""A run continues from a checkpoint in another place than its storage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.manifests import commit_files, stored_keys
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from trial_core.trainer.checkpoint_source import copy_into, is_place, resume_manifest
from trial_core.transfer.fetch import download


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
    """With all its files, under its uuid, as committed by the run's attempt; once."""
    manifest = commit_files(theirs)
    place = theirs.files_url(manifest.uuid)
    if by == "folder":
        download(theirs, manifest.uuid, tmp_path / "downloaded")
        place = str(tmp_path / "downloaded")
    assert is_place(place)
    assert not is_place(manifest.uuid)
    assert resume_manifest(ours, place) == manifest
    fence = ours.take_over(manifest.trial, "mine")
    copied = copy_into(ours, place, fence)
    assert copied == msgspec.structs.replace(manifest, attempt="mine")
    assert ours.verify(manifest.uuid) == copied
    before = stored_keys(ours)
    assert copy_into(ours, place, fence) == resume_manifest(ours, place) == copied
    assert stored_keys(ours) == before


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


def test_other_places_are_refused(ours: CheckpointStore, tmp_path: Path) -> None:
    """The error says what a place looks like."""
    with pytest.raises(CheckpointError, match=r"is no checkpoint: expected a folder with a"):
        resume_manifest(ours, str(tmp_path))
    with pytest.raises(CheckpointNotFound):
        resume_manifest(ours, f"{tmp_path}/missing")
