"""What is moved once is not moved again: uploads that go on, files that are on this machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.manifests import FILES, entry, stage, stored_files, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError
from trial_core.storage.parallel import StopSignal
from trial_core.transfer.files import Source, fetch_files, upload_sources, verify_files


@pytest.fixture(params=["file", "memory", "s3fs", "obstore"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    """Staged files to upload."""
    staging = stage(tmp_path / "staging", FILES)
    return [Source(path, staging / path, len(data)) for path, data in sorted(FILES.items())]


def watch_uploads(monkeypatch: pytest.MonkeyPatch, store: CheckpointStore) -> list[str]:
    """The names of files that are sent from now on."""
    sent: list[str] = []
    store_file = store.storage._store_file

    def note(source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        sent.append(key.removeprefix("checkpoints/u/"))
        return store_file(source, size_bytes, key, stop)

    monkeypatch.setattr(store.storage, "_store_file", note)
    return sent


def test_what_is_stored_is_not_sent_again(
    store: CheckpointStore, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry sends what an earlier try did not come to, and gives all entries."""
    told: list[FileEntry] = []
    entries = upload_sources(store, "u", sources, 3, on_stored=told.append)
    assert sorted(told, key=lambda each: each.path) == entries
    sent = watch_uploads(monkeypatch, store)
    stored = {each.path: each for each in told[:2]}
    assert upload_sources(store, "u", sources, 3, stored=stored) == entries
    assert sent == [each.path for each in entries if each.path not in stored]


@pytest.mark.parametrize("has_become", [None, b"short"])
def test_what_is_not_there_any_more_is_sent_again(
    store: CheckpointStore, sources: list[Source], has_become: bytes | None
) -> None:
    """A claim that a file is stored does not stand against the storage."""
    entries = upload_sources(store, "u", sources, 3)
    key = layout.file_key("u", entries[0].path)
    store.storage.delete(key) if has_become is None else store.storage.write(key, has_become)
    stored = {each.path: each for each in entries}
    assert upload_sources(store, "u", sources, 3, stored=stored) == entries
    verify_files(store, "u", entries)


def test_a_file_that_has_grown_since_is_sent_again(
    store: CheckpointStore, sources: list[Source]
) -> None:
    """What was stored of another state of the file does not count."""
    stored = {each.path: each for each in upload_sources(store, "u", sources, 3)}
    grown = grow(sources[0], b"and more")
    again = upload_sources(store, "u", [grown, *sources[1:]], 3, stored=stored)
    assert again[0].size_bytes == sources[0].size_bytes + len(b"and more")
    verify_files(store, "u", again)


def grow(source: Source, more: bytes) -> Source:
    """The same source, whose file has grown."""
    with open(source.file, "ab") as file:
        file.write(more)
    return Source(source.path, source.file, source.size_bytes + len(more))


def test_what_was_stored_before_a_failure_is_told(
    store: CheckpointStore, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of an upload that fails half-way need not be sent when it is tried again."""
    told: dict[str, FileEntry] = {}
    missing = Source("zzz", Path("/nonexistent"), 1)

    def remember(each: FileEntry) -> None:
        told[each.path] = each

    with pytest.raises(StorageError, match="it does not exist"):
        upload_sources(store, "u", [*sources, missing], 3, on_stored=remember, threads=1)
    assert told.keys() == FILES.keys()
    sent = watch_uploads(monkeypatch, store)
    upload_sources(store, "u", sources, 3, stored=told)
    assert sent == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
def test_a_file_in_memory_is_a_source(store: CheckpointStore) -> None:
    """By its path among this process's descriptors; what lies behind its size does not count."""
    memory = os.memfd_create("image")
    os.write(memory, b"0123456789-behind")
    file = Path(f"/proc/self/fd/{memory}")
    try:
        entries = upload_sources(store, "u", [Source("a", file, 10)], 3)
        assert entries == [entry("a", b"0123456789", 3)]
        with pytest.raises(CheckpointError, match="changed"):
            upload_sources(store, "u", [Source("a", file, 18)], 3)
    finally:
        os.close(memory)
    verify_files(store, "u", entries)


def drop_all(store: CheckpointStore, manifest: Manifest) -> None:
    """Whatever is read of the storage from now on is not what it was."""
    for each in manifest.files:
        store.storage.write(layout.file_key(manifest.uuid, each.path), b"\0" * each.size_bytes)


def test_staged_files_are_not_fetched(store: CheckpointStore, tmp_path: Path) -> None:
    """A restart on the machine that has saved takes what lies there."""
    manifest = upload(store, tmp_path / "staging")
    drop_all(store, manifest)
    local = [tmp_path / "nowhere", tmp_path / "staging"]
    fetched = fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target", local=local)
    assert fetched == 0
    assert stored_files(tmp_path / "target") == FILES


def test_staged_files_that_differ_are_fetched(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Each is believed for its digest alone: changed, truncated, missing ones come from storage."""
    files = {"changed": b"12", "short": b"34", "gone": b"56", "good": b"78"}
    manifest = upload(local_store, tmp_path / "staging", files)
    (tmp_path / "staging" / "changed").write_bytes(b"21")
    (tmp_path / "staging" / "short").write_bytes(b"3")
    (tmp_path / "staging" / "gone").unlink()
    local = [tmp_path / "staging"]
    target = tmp_path / "target"
    assert fetch_files(local_store, manifest.uuid, manifest.files, target, local=local) == 6
    assert stored_files(target) == files


@pytest.mark.parametrize("can_link", [True, False])
def test_files_are_taken_over_from_any_disk(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    """By a link where that is possible, else by a copy; and they stay when the folder goes."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    manifest = upload(local_store, tmp_path / "staging", {"a": b"1" * 1000})
    staged, target = tmp_path / "staging" / "a", tmp_path / "target" / "a"
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    local = [tmp_path / "staging"]
    fetch_files(local_store, manifest.uuid, manifest.files, target.parent, local=local)
    assert (target.stat().st_ino == staged.stat().st_ino) == can_link
    staged.unlink()
    assert stored_files(target.parent) == {"a": b"1" * 1000}


def test_a_file_that_cannot_be_taken_over_is_fetched(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local disk that fails does not fail a restore that the storage can do."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    manifest = upload(local_store, tmp_path / "staging")
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr("shutil.copyfile", fail)
    local, target = [tmp_path / "staging"], tmp_path / "target"
    fetched = fetch_files(local_store, manifest.uuid, manifest.files, target, local=local)
    assert fetched == manifest.total_bytes
    assert stored_files(target) == FILES
