from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.manifests import FILES, entry, stage, stored_files, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.local_files import local_digest
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import (
    StagedFile,
    merge_entries,
    prefix_rank,
    staged_files,
    upload_files,
    upload_staged,
)
from trial_core.errors import CheckpointError, StorageError


@pytest.fixture
def files(tmp_path: Path) -> list[StagedFile]:
    """Staged files to upload."""
    return staged_files(stage(tmp_path / "staging", FILES), 3)


def watch_uploads(monkeypatch: pytest.MonkeyPatch, store: CheckpointStore) -> list[str]:
    """The paths of files that are uploaded from now on."""
    uploaded: list[str] = []
    store_file = store.storage._store_file

    def note(source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        uploaded.append(key.removeprefix("checkpoints/u/"))
        return store_file(source, size_bytes, key, stop)

    monkeypatch.setattr(store.storage, "_store_file", note)
    return uploaded


def test_entries_describe_the_uploaded_files(store: CheckpointStore, tmp_path: Path) -> None:
    """Path, size, digest and rank are those of the staged files, sorted by path."""
    manifest = upload(store, tmp_path / "staging", rank=5)
    assert manifest.files == [entry(path, FILES[path], 5) for path in sorted(FILES)]


def test_a_repeated_upload_gives_the_same_entries(store: CheckpointStore, tmp_path: Path) -> None:
    """Uncommitted files are overwritten."""
    manifest = upload(store, tmp_path / "staging")
    assert upload_files(store, manifest.uuid, tmp_path / "staging", 3) == manifest.files
    assert store.find_damage(manifest.uuid, manifest.files) == []


def test_a_retry_skips_stored_files(
    local_store: CheckpointStore, files: list[StagedFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uploads only what the earlier attempt did not store, and returns all entries."""
    reported: list[FileEntry] = []
    entries = upload_staged(local_store, "u", files, 3, on_stored=reported.append)
    assert sorted(reported, key=lambda each: each.path) == entries
    uploaded = watch_uploads(monkeypatch, local_store)
    stored = {each.path: each for each in reported[:2]}
    assert upload_staged(local_store, "u", files, 3, stored=stored) == entries
    assert uploaded == [each.path for each in entries if each.path not in stored]


def test_what_has_changed_once_is_not_hashed_before_it_is_sent(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not changed is, each time, and is not stored again. What changes no more is stored
    once more, and then hashed as well."""
    hashed: list[str] = []

    def digest(path: Path, *arguments: Any) -> str:
        hashed.append(path.name)
        return local_digest(path, *arguments)

    monkeypatch.setattr("trial_core.checkpoint.transfer.upload.local_digest", digest)
    shared: list[FileEntry] = []
    changing: set[str] = set()
    for number in range(6):
        content = {"frozen": b"f" * 9, "trained": b"%09d" % min(number, 3), "step": b"1"}
        files = staged_files(stage(tmp_path / f"{number}", content), 0)
        hashed.clear()
        entries = upload_staged(
            local_store, f"u{number}", files, 0, shared=shared, changing=changing
        )
        both, one = ["frozen", "trained"], ["frozen"]
        assert sorted(hashed) == [[], both, one, one, one, both][number]
        stored = [each.path for each in entries if each.stored_at]
        assert stored == [[], one, one, one, one, both][number]
        places = ("/".join(each.place(f"u{number}")) for each in entries)
        shared = [replace(each, stored_at=at) for each, at in zip(entries, places, strict=True)]


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_retry_uploads_files_that_are_gone(
    local_store: CheckpointStore, files: list[StagedFile], content: bytes | None
) -> None:
    """A stored file counts only if it still exists with its size."""
    entries = upload_staged(local_store, "u", files, 3)
    storage, key = local_store.storage, layout.file_key("u", entries[0].path)
    storage.delete(key) if content is None else storage.write(key, content)
    stored = {each.path: each for each in entries}
    assert upload_staged(local_store, "u", files, 3, stored=stored) == entries
    assert local_store.find_damage("u", entries) == []


def test_a_retry_uploads_a_file_that_has_grown(
    local_store: CheckpointStore, tmp_path: Path, files: list[StagedFile]
) -> None:
    """A stored file counts only if the staged file still has that size."""
    stored = {each.path: each for each in upload_staged(local_store, "u", files, 3)}
    with open(files[0].file, "ab") as file:
        file.write(b"and more")
    again = upload_staged(local_store, "u", staged_files(tmp_path / "staging", 3), 3, stored=stored)
    assert again[0].size_bytes == files[0].size_bytes + len(b"and more")
    assert local_store.find_damage("u", again) == []


def test_a_failed_upload_reports_the_files_it_stored(
    local_store: CheckpointStore, files: list[StagedFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a retry can skip them."""
    reported: dict[str, FileEntry] = {}
    monkeypatch.setattr("trial_core.checkpoint.transfer.upload.UPLOAD_THREADS", 1)
    missing = StagedFile("zzz", "/nonexistent", 1)

    def note(each: FileEntry) -> None:
        reported[each.path] = each

    with pytest.raises(StorageError, match="it does not exist"):
        upload_staged(local_store, "u", [*files, missing], 3, on_stored=note)
    assert reported.keys() == FILES.keys()
    uploaded = watch_uploads(monkeypatch, local_store)
    upload_staged(local_store, "u", files, 3, stored=reported)
    assert uploaded == []


def test_a_file_that_is_gone_before_it_is_compared_is_a_storage_error(
    local_store: CheckpointStore, files: list[StagedFile]
) -> None:
    """The file is named. It is hashed, as an earlier checkpoint has one of its size."""
    missing = StagedFile("zzz", "/nonexistent", 99)
    shared = [replace(entry("zzz", b"z" * 99), stored_at="earlier/zzz")]
    with pytest.raises(StorageError, match="cannot read /nonexistent: it does not exist"):
        upload_staged(local_store, "u", [*files, missing], 3, shared=shared)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_a_memory_file_is_uploaded_up_to_its_size(store: CheckpointStore) -> None:
    """Bytes behind the given size are not uploaded; a shorter file is an error."""
    memory = os.memfd_create("shard")
    os.write(memory, b"0123456789-behind")
    path = f"/proc/self/fd/{memory}"
    try:
        entries = upload_staged(store, "u", [StagedFile("a", path, 10)], 3)
        assert entries == [entry("a", b"0123456789", 3)]
        with pytest.raises(CheckpointError, match="changed"):
            upload_staged(store, "u", [StagedFile("a", path, 18)], 3)
    finally:
        os.close(memory)
    assert store.find_damage("u", entries) == []


def test_a_failed_upload_leaves_no_partial_file(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A file that cannot be written is a StorageError, and no temporary file remains."""
    staging = stage(tmp_path / "staging", {"a/b": b"1" * 100, "a/c": b"2"})
    (tmp_path / "local" / "checkpoints" / "u").mkdir(parents=True)
    (tmp_path / "local" / "checkpoints" / "u" / "a").write_bytes(b"in the way")
    with pytest.raises(StorageError, match="cannot upload"):
        upload_files(local_store, "u", staging, 0)
    assert stored_files(tmp_path / "local") == {"checkpoints/u/a": b"in the way"}


def test_a_file_that_changes_during_its_upload_is_refused(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modification time is compared before and after."""
    staging = stage(tmp_path / "staging", {"a": b"1"})
    store_file = store.storage._store_file

    def touch_then_store(source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        os.utime(source, ns=(1, 1))
        return store_file(source, size_bytes, key, stop)

    monkeypatch.setattr(store.storage, "_store_file", touch_then_store)
    with pytest.raises(CheckpointError, match="changed while it was uploaded"):
        upload_files(store, "u", staging, 0)


def test_ranks_may_save_equal_files() -> None:
    """The lowest rank's entry is kept."""
    merged = merge_entries({2: [entry("same", b"1", 2)], 1: [entry("same", b"1", 1), entry("a")]})
    assert merged == [entry("a"), entry("same", b"1", 1)]


def test_ranks_may_not_overwrite_each_other() -> None:
    """The error names the ranks and two ways to correct the trial."""
    with pytest.raises(CheckpointError, match=r"ranks 1 and 2 both saved a file 'same'.*rank == 0"):
        merge_entries({1: [entry("same", b"1", 1)], 2: [entry("same", b"2", 2)]})


def test_a_rank_is_named_once_in_its_error() -> None:
    """A message that starts with the rank is kept; rank 1 is not rank 11."""
    assert prefix_rank(1, "rank 1 saved a file") == "rank 1 saved a file"
    assert prefix_rank(1, "the disk is full") == "rank 1: the disk is full"
    assert prefix_rank(1, "rank 11 is gone") == "rank 1: rank 11 is gone"


def test_links_are_followed_inside_the_folder_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken link, a link out of the folder and a circle are skipped with a warning."""
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
        paths = {file.path for file in staged_files(staging, 0)}
    assert paths == {
        "a/file",
        "a/to-b/other",
        "b/other",
        "b/to-a/file",
        "latest/file",
        "latest/to-b/other",
    }
    for skipped in ("dangling", "itself", "out", "up"):
        assert f"staging/{skipped} is a link" in caplog.text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("manifest.json", "own manifest or code"),
        ("trial-code.tar", "own manifest or code"),
        ("a\\b", "backslash"),
    ],
)
def test_a_name_that_is_not_allowed_is_refused_before_the_upload(
    local_store: CheckpointStore, tmp_path: Path, name: str, why: str
) -> None:
    """Nothing is uploaded if a restore would refuse the name."""
    staging = stage(tmp_path / "staging", {name: b"1", "a": b"2"})
    with pytest.raises(CheckpointError, match=why):
        upload_files(local_store, "u", staging, 0)
    assert local_store.storage.sizes(layout.CHECKPOINTS) == {}
