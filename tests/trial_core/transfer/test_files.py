from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from tests.support.manifests import (
    FILES,
    entry,
    new_manifest,
    stage,
    stored_files,
    upload,
)
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.storage.parallel import StopSignal
from trial_core.transfer.files import (
    download,
    fetch_files,
    find_damage,
    merge_entries,
    upload_files,
    verify_files,
)

DAMAGED = "mp_rank_00/model states.pt"


@pytest.fixture(params=["file", "memory", "s3fs", "obstore"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def damage(store: CheckpointStore, manifest: Manifest, data: bytes | None) -> None:
    """Overwrite a stored file, or remove it."""
    key = layout.file_key(manifest.uuid, DAMAGED)
    if data is None:
        store.storage.delete(key)
    else:
        store.storage.write(key, data)


flipped = FILES[DAMAGED][:-1] + b"\x00"
all_damage = pytest.mark.parametrize(
    ("data", "seen"),
    [
        (flipped, "has digest sha256:[0-9a-f]{64}, expected sha256:[0-9a-f]{64}"),
        (FILES[DAMAGED][:-1], "has 4999 bytes, expected 5000"),
        (FILES[DAMAGED] + b"1", "has 5001 bytes, expected 5000"),
        (None, "is missing"),
    ],
    ids=["flipped", "truncated", "longer", "missing"],
)


def test_files_come_back_as_they_were(store: CheckpointStore, tmp_path: Path) -> None:
    """Whatever a trial's save wrote, names and bytes, is what a restore finds."""
    manifest = upload(store, tmp_path / "staging")
    fetched = fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == FILES
    assert fetched == manifest.total_bytes == sum(map(len, FILES.values()))


def test_entries_say_what_was_uploaded(store: CheckpointStore, tmp_path: Path) -> None:
    """Path, size, digest and rank are those of the staged files, in order of path."""
    manifest = upload(store, tmp_path / "staging", rank=5)
    assert manifest.files == [entry(path, FILES[path], 5) for path in sorted(FILES)]


def test_a_file_of_many_parts_comes_back(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of several parts and reads, whose size is no multiple of either, is whole."""
    monkeypatch.setattr("trial_core.storage.buffer_pool.PIECE_BYTES", 5 * 2**20)
    files = {"big": os.urandom(11 * 2**20 + 7)}
    manifest = upload(store, tmp_path / "staging", files)
    fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == files


def test_uploading_again_does_no_harm(store: CheckpointStore, tmp_path: Path) -> None:
    """A retry of the upload gives the same entries."""
    manifest = upload(store, tmp_path / "staging")
    again = upload_files(store, manifest.uuid, tmp_path / "staging", 3)
    assert again == manifest.files
    verify_files(store, manifest.uuid, again)


@all_damage
def test_damage_is_found_before_a_file_gets_its_name(
    store: CheckpointStore, tmp_path: Path, data: bytes | None, seen: str
) -> None:
    """A file that differs is named, with its rank, and nothing of it stays in the target."""
    manifest = upload(store, tmp_path / "staging")
    damage(store, manifest, data)
    with pytest.raises(CheckpointDamaged, match=f"model states.pt, written by rank 3, {seen}"):
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    left = stored_files(tmp_path / "target")
    assert DAMAGED not in left
    assert not [path for path in left if path.endswith(".part")]


@all_damage
def test_verify_names_the_damaged_file(
    store: CheckpointStore, tmp_path: Path, data: bytes | None, seen: str
) -> None:
    """Reading every byte finds what differs, and only that."""
    manifest = upload(store, tmp_path / "staging")
    verify_files(store, manifest.uuid, manifest.files)
    damage(store, manifest, data)
    assert [each.entry.path for each in find_damage(store, manifest.uuid, manifest.files)] == [
        DAMAGED
    ]
    with pytest.raises(CheckpointDamaged, match=seen):
        verify_files(store, manifest.uuid, manifest.files)


def test_what_is_there_is_not_fetched_again(store: CheckpointStore, tmp_path: Path) -> None:
    """Local files with the right digest are kept; one that differs is fetched anew."""
    manifest = upload(store, tmp_path / "staging")
    target = tmp_path / "target"
    fetch_files(store, manifest.uuid, manifest.files, target)
    (target / DAMAGED).write_bytes(flipped)
    assert fetch_files(store, manifest.uuid, manifest.files, target) == len(flipped)
    assert stored_files(target) == FILES


def test_a_path_that_leads_out_is_not_written(store: CheckpointStore, tmp_path: Path) -> None:
    """A hostile entry writes nothing, anywhere."""
    uuid = new_manifest().uuid
    store.storage.write("checkpoints/outside", b"x")
    with pytest.raises(CheckpointDamaged, match="would be written outside"):
        fetch_files(store, uuid, [entry("../outside")], tmp_path / "deep" / "target")
    assert stored_files(tmp_path / "deep") == {}


def test_a_target_that_cannot_be_written_is_said(store: CheckpointStore, tmp_path: Path) -> None:
    """The restore's own disk is not blamed on the storage."""
    manifest = upload(store, tmp_path / "staging")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write into .*/file/target: .* not a folder"):
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "file" / "target")


def test_links_inside_are_files_and_others_are_left_out(
    local_store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A dangling link, one that leads out and one in a circle do not lose the checkpoint."""
    staging = stage(tmp_path / "staging", {"a/file": b"1", "b/other": b"2"})
    (tmp_path / "secret").write_bytes(b"3")
    (staging / "latest").symlink_to("a")
    (staging / "a" / "to-b").symlink_to("../b")
    (staging / "b" / "to-a").symlink_to("../a")
    (staging / "dangling").symlink_to("nowhere")
    (staging / "itself").symlink_to("itself")
    (staging / "out").symlink_to("../secret")
    (staging / "up").symlink_to(".")
    with caplog.at_level(logging.WARNING):
        entries = upload_files(local_store, "u", staging, 0)
    assert {each.path for each in entries} == {
        "a/file",
        "a/to-b/other",
        "b/other",
        "b/to-a/file",
        "latest/file",
        "latest/to-b/other",
    }
    for left_out in ("dangling", "itself", "out", "up"):
        assert f"staging/{left_out} is a link" in caplog.text


@pytest.mark.parametrize(
    ("name", "why"), [("manifest.json", "own manifest"), ("a\\b", "backslash")]
)
def test_a_name_that_cannot_be_used_is_said_at_once(
    local_store: CheckpointStore, tmp_path: Path, name: str, why: str
) -> None:
    """Nothing is uploaded when a later restore would have to refuse it."""
    staging = stage(tmp_path / "staging", {name: b"1", "a": b"2"})
    with pytest.raises(CheckpointError, match=why):
        upload_files(local_store, "u", staging, 0)
    assert local_store.storage.sizes(layout.CHECKPOINTS) == {}


def test_a_failed_upload_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """What cannot be written is a StorageError, and no file with half its bytes is there."""
    staging = stage(tmp_path / "staging", {"a/b": b"1" * 100, "a/c": b"2"})
    (tmp_path / "local" / "checkpoints" / "u" / "a").parent.mkdir(parents=True)
    (tmp_path / "local" / "checkpoints" / "u" / "a").write_bytes(b"in the way")
    with pytest.raises(StorageError, match="cannot upload"):
        upload_files(CheckpointStore(str(tmp_path / "local")), "u", staging, 0)
    assert stored_files(tmp_path / "local") == {"checkpoints/u/a": b"in the way"}


def test_ranks_may_share_an_equal_file() -> None:
    """Of one file that several ranks wrote alike, the lowest rank's entry is kept."""
    merged = merge_entries({2: [entry("same", b"1", 2)], 1: [entry("same", b"1", 1), entry("a")]})
    assert merged == [entry("a"), entry("same", b"1", 1)]


def test_ranks_may_not_overwrite_each_other() -> None:
    """Different contents under one name are refused, with the ranks and a way out."""
    with pytest.raises(CheckpointError, match=r"ranks 1 and 2 both saved a file 'same'.*rank == 0"):
        merge_entries({1: [entry("same", b"1", 1)], 2: [entry("same", b"2", 2)]})


def test_download_brings_everything(store: CheckpointStore, tmp_path: Path) -> None:
    """All files and the manifest are there; downloading again over it is fine."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    target = tmp_path / "target"
    for _ in range(2):
        assert download(store, manifest.uuid[:8], target) == manifest
        assert stored_files(target) == {**FILES, "manifest.json": manifest.to_json()}


def test_download_leaves_other_files_alone(store: CheckpointStore, tmp_path: Path) -> None:
    """A folder with something else in it is refused, another checkpoint included."""
    first = upload(store, tmp_path / "first")
    second = upload(store, tmp_path / "second", {"a": b"1"})
    store.commit(first)
    store.commit(second)
    download(store, first.uuid, tmp_path / "target")
    with pytest.raises(CheckpointError, match="is not empty, and does not hold checkpoint"):
        download(store, second.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**FILES, "manifest.json": first.to_json()}


def test_an_interrupted_download_goes_on(store: CheckpointStore, tmp_path: Path) -> None:
    """A download that failed half-way has no manifest, and a second one completes it."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    damage(store, manifest, flipped)
    with pytest.raises(CheckpointDamaged):
        download(store, manifest.uuid, tmp_path / "target")
    assert not (tmp_path / "target" / "manifest.json").exists()
    damage(store, manifest, FILES[DAMAGED])
    download(store, manifest.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**FILES, "manifest.json": manifest.to_json()}


def test_a_file_that_changes_is_not_uploaded(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a file while it is uploaded is found out."""
    staging = stage(tmp_path / "staging", {"a": b"1"})
    store_file = store.storage._store_file

    def touch_then_store(source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        os.utime(source, ns=(1, 1))
        return store_file(source, size_bytes, key, stop)

    monkeypatch.setattr(store.storage, "_store_file", touch_then_store)
    with pytest.raises(CheckpointError, match="changed while it was uploaded"):
        upload_files(store, "u", staging, 0)


def test_entries_survive_the_way_to_the_driver(
    tmp_path: Path, local_store: CheckpointStore
) -> None:
    """Ranks send their entries as plain data."""
    manifest = upload(local_store, tmp_path / "staging")
    sent = msgspec.msgpack.encode(manifest.files)
    assert msgspec.msgpack.decode(sent, type=list[FileEntry]) == manifest.files
