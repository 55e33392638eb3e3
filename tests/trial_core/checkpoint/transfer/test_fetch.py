from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.manifests import FILES, entry, new_manifest, stored_files, upload
from tests.support.stores import FOLDER_FIRST
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download, fetch_files, take_local
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.processes.machine.memory_files import MemoryFiles, is_memory_file

DAMAGED = "mp_rank_00/model states.pt"
CHANGED = FILES[DAMAGED][:-1] + b"\x00"


def overwrite(store: CheckpointStore, manifest: Manifest, data: bytes | None) -> None:
    """Overwrite a stored file, or delete it."""
    key = layout.file_key(manifest.uuid, DAMAGED)
    if data is None:
        store.storage.delete(key)
    else:
        store.storage.write(key, data)


def test_fetched_files_equal_the_uploaded_ones(store: CheckpointStore, tmp_path: Path) -> None:
    """Names and contents survive, and the fetched bytes are counted."""
    manifest = upload(store, tmp_path / "staging")
    fetched = fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == FILES
    assert fetched == manifest.total_bytes == sum(map(len, FILES.values()))


def test_a_file_of_several_parts_is_fetched_whole(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is no multiple of the piece size."""
    monkeypatch.setattr("trial_core.checkpoint.storage.buffer_pool.PIECE_BYTES", 5 * 2**20)
    files = {"big": os.urandom(11 * 2**20 + 7)}
    manifest = upload(store, tmp_path / "staging", files)
    fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == files


DAMAGE = {
    "changed": (CHANGED, "has digest sha256:[0-9a-f]{64}, expected sha256:[0-9a-f]{64}"),
    "truncated": (FILES[DAMAGED][:-1], "has 4999 bytes, expected 5000"),
    "longer": (FILES[DAMAGED] + b"1", "has 5001 bytes, expected 5000"),
    "missing": (None, "is missing"),
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *(("file", damage) for damage in DAMAGE),
        *(
            pytest.param(kind, each, marks=pytest.mark.long)
            for kind in ("s3", "memory")
            for each in DAMAGE
        ),
    ],
    indirect=["kind"],
)
def test_a_damaged_file_is_found_and_never_fetched(
    store: CheckpointStore, tmp_path: Path, damage: str
) -> None:
    """Fetch and verify name the file, its rank and the difference; the target has no part of it."""
    data, seen = DAMAGE[damage]
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    assert store.verify(manifest.uuid) == manifest
    overwrite(store, manifest, data)
    with pytest.raises(CheckpointDamaged, match=f"model states.pt, written by rank 3, {seen}"):
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    fetched = stored_files(tmp_path / "target")
    assert DAMAGED not in fetched
    assert not [path for path in fetched if path.endswith(".part")]
    damage = store.find_damage(manifest.uuid, manifest.files)
    assert [each.entry.path for each in damage] == [DAMAGED]
    with pytest.raises(CheckpointDamaged, match=seen):
        store.verify(manifest.uuid)


def test_files_already_in_the_target_are_not_fetched(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Files with the right digest are kept; others are fetched again."""
    manifest = upload(local_store, tmp_path / "staging")
    target = tmp_path / "target"
    fetch_files(local_store, manifest.uuid, manifest.files, target)
    (target / DAMAGED).write_bytes(CHANGED)
    assert fetch_files(local_store, manifest.uuid, manifest.files, target) == len(CHANGED)
    assert stored_files(target) == FILES


def test_a_path_outside_the_target_is_refused(local_store: CheckpointStore, tmp_path: Path) -> None:
    """A hostile manifest entry writes nothing anywhere."""
    local_store.storage.write("checkpoints/outside", b"x")
    target = tmp_path / "deep" / "target"
    with pytest.raises(CheckpointDamaged, match="do not use it"):
        fetch_files(local_store, new_manifest().uuid, [entry("../outside")], target)
    assert stored_files(tmp_path / "deep") == {}


def test_a_target_that_cannot_be_written_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    """The error blames the local disk, not the storage."""
    manifest = upload(store, tmp_path / "staging")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write into .*/file/target: .* not a folder"):
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "file" / "target")


def test_local_copies_are_used_instead_of_fetching(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Only copies with the right digest: changed, truncated and missing ones are fetched."""
    files = {"changed": b"12", "short": b"34", "gone": b"56", "good": b"789"}
    staging, target = tmp_path / "staging", tmp_path / "target"
    manifest = upload(local_store, staging, files)
    (staging / "changed").write_bytes(b"21")
    (staging / "short").write_bytes(b"3")
    (staging / "gone").unlink()
    local = [tmp_path / "nowhere", staging]
    missing = take_local(manifest.uuid, manifest.files, target, local)
    assert {entry.path for entry in missing} == {"changed", "short", "gone"}
    assert fetch_files(local_store, manifest.uuid, manifest.files, target) == 6
    assert stored_files(target) == files


@pytest.mark.parametrize("can_link", [True, False])
def test_a_local_copy_is_linked_or_copied(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    """It is copied from another disk. It stays when the original folder is deleted."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    manifest = upload(local_store, tmp_path / "staging", {"a": b"1" * 1000})
    staged, target = tmp_path / "staging" / "a", tmp_path / "target" / "a"
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    local = [tmp_path / "staging"]
    assert take_local(manifest.uuid, manifest.files, target.parent, local) == []
    assert (target.stat().st_ino == staged.stat().st_ino) == can_link
    staged.unlink()
    assert stored_files(target.parent) == {"a": b"1" * 1000}


def test_a_local_copy_in_memory_stays_there(tmp_path: Path) -> None:
    """Its bytes are not written to a disk."""
    memory = MemoryFiles(10_000)
    memory.begin()
    memory.write(tmp_path / "kept", "a.pt", lambda file: file.write(b"in memory"))
    memory.end()
    target, wanted = tmp_path / "target", [entry("a.pt", b"in memory")]
    assert take_local(new_manifest().uuid, wanted, target, [tmp_path / "kept"]) == []
    assert is_memory_file(target / "a.pt")
    assert (target / "a.pt").read_bytes() == b"in memory"
    memory.close()


def test_a_file_is_fetched_if_its_local_copy_cannot_be_read(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing local disk does not fail the restore."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    manifest = upload(local_store, tmp_path / "staging")
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr("shutil.copyfile", fail)
    local, target = [tmp_path / "staging"], tmp_path / "target"
    missing = take_local(manifest.uuid, manifest.files, target, local)
    assert fetch_files(local_store, manifest.uuid, missing, target) == manifest.total_bytes
    assert stored_files(target) == FILES


@pytest.mark.parametrize("kind", FOLDER_FIRST, indirect=True)
def test_a_download_has_all_files_and_the_manifest(store: CheckpointStore, tmp_path: Path) -> None:
    """A prefix of the uuid is enough; a repeated download changes nothing."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    target = tmp_path / "target"
    for _ in range(2):
        assert download(store, manifest.uuid[:8], target) == manifest
        assert stored_files(target) == {**FILES, "manifest.json": manifest.to_json()}


def test_a_download_refuses_a_folder_with_other_files(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Files of another checkpoint are not overwritten either."""
    first = upload(local_store, tmp_path / "first")
    second = upload(local_store, tmp_path / "second", {"a": b"1"})
    local_store.commit(first)
    local_store.commit(second)
    download(local_store, first.uuid, tmp_path / "target")
    with pytest.raises(CheckpointError, match="is not empty, and does not hold checkpoint"):
        download(local_store, second.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**FILES, "manifest.json": first.to_json()}


def test_a_failed_download_can_be_completed(local_store: CheckpointStore, tmp_path: Path) -> None:
    """It leaves no manifest; the next download fetches the rest."""
    manifest = upload(local_store, tmp_path / "staging")
    local_store.commit(manifest)
    overwrite(local_store, manifest, CHANGED)
    with pytest.raises(CheckpointDamaged):
        download(local_store, manifest.uuid, tmp_path / "target")
    assert not (tmp_path / "target" / "manifest.json").exists()
    overwrite(local_store, manifest, FILES[DAMAGED])
    download(local_store, manifest.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**FILES, "manifest.json": manifest.to_json()}


def test_a_checkpoint_makes_a_round_trip_through_s3(
    s3_store: CheckpointStore, tmp_path: Path
) -> None:
    """Check the storage, upload, commit, list, download and find damage."""
    files = {**FILES, "big": os.urandom(40 * 2**20 + 13)}
    s3_store.storage.check_usable()
    manifest = upload(s3_store, tmp_path / "staging", files)
    assert s3_store.list() == []
    s3_store.commit(manifest)
    assert s3_store.list() == [manifest]
    download(s3_store, manifest.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**files, "manifest.json": manifest.to_json()}
    s3_store.storage.write(layout.file_key(manifest.uuid, "big"), b"short")
    with pytest.raises(CheckpointDamaged, match="big, written by rank 3, has 5 bytes"):
        download(s3_store, manifest.uuid, tmp_path / "again")
