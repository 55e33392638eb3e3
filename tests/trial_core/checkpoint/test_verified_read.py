from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.support.manifests import stored_files, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage import buffer_pool
from trial_core.checkpoint.storage.base import RangeRead, Storage
from trial_core.checkpoint.storage.buffer_pool import BufferPool
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.checkpoint.verified_read import find_damage, noted_damage
from trial_core.errors import CheckpointDamaged

PIECE = 100
BIG = os.urandom(7 * PIECE + 13)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "PIECE_BYTES", PIECE)


def upload_whole(
    store: CheckpointStore, folder: Path, files: dict[str, bytes] | None = None
) -> Manifest:
    """Upload each file in one part: S3 accepts no parts as small as the ranges here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_pool, "PIECE_BYTES", 2**20)
        return upload(store, folder / "staging", files or {"big": BIG})


def overwrite_after_the_first_range(
    monkeypatch: pytest.MonkeyPatch, store: CheckpointStore, manifest: Manifest
) -> None:
    """Overwrite the file ``big`` after its first range has been read."""
    key, read_into = layout.file_key(manifest.uuid, "big"), store.storage.read_into

    def read_then_overwrite(
        of: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        piece = read_into(of, start, view, stop, version)
        if start == 0:
            store.storage.write(key, BIG[::-1])
        return piece

    monkeypatch.setattr(store.storage, "read_into", read_then_overwrite)
    monkeypatch.setattr("trial_core.checkpoint.verified_read.READ_THREADS", 1)


@pytest.mark.usefixtures("small_pieces")
def test_files_of_any_number_of_ranges_are_read(store: CheckpointStore, tmp_path: Path) -> None:
    """Several ranges with and without a remainder, one range, one byte, no byte.

    How many bytes are read is told after each range.
    """
    sizes = {"rest": 713, "whole": 700, "one": PIECE, "byte": 1, "empty": 0}
    files = {name: BIG[:size] for name, size in sizes.items()}
    manifest = upload_whole(store, tmp_path, files)
    read: list[tuple[int, int]] = []
    fetched = fetch_files(
        store, manifest.uuid, manifest.files, tmp_path / "target",
        on_read=lambda done, total: read.append((done, total)),
    )  # fmt: skip
    assert stored_files(tmp_path / "target") == files
    assert fetched == sum(sizes.values())
    assert read == sorted(read)
    assert read[-1] == (fetched, fetched)
    assert store.find_damage(manifest.uuid, manifest.files) == []


@pytest.mark.usefixtures("small_pieces")
def test_ranges_of_one_file_are_read_in_parallel(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One big file is read over several connections."""
    manifest = upload(local_store, tmp_path / "staging", {"big": BIG})
    both, read_into = Barrier(2), local_store.storage.read_into

    def read_together(of: str, start: int, *others: Any) -> RangeRead:
        if start < 2 * PIECE:
            both.wait(timeout=10)
        return read_into(of, start, *others)

    monkeypatch.setattr(local_store.storage, "read_into", read_together)
    assert local_store.find_damage(manifest.uuid, manifest.files) == []


@pytest.mark.usefixtures("small_pieces")
def test_readers_that_share_a_pool_do_not_deadlock(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """The range that must be hashed next always has a buffer."""
    manifest = upload(local_store, tmp_path / "staging", {"a": BIG, "b": BIG[1:], "c": BIG * 30})
    local_store.storage.buffers = BufferPool(2)

    def read(_: int) -> list[Any]:
        return find_damage(local_store.storage, manifest.uuid, manifest.files)

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read, number) for number in range(3)]
        assert [each.result(timeout=60) for each in reading] == [[], [], []]


@pytest.mark.usefixtures("small_pieces")
def test_a_file_overwritten_between_ranges_is_damage(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of two versions is refused, and the error says why."""
    manifest = upload_whole(store, tmp_path)
    overwrite_after_the_first_range(monkeypatch, store, manifest)
    seen = "has digest" if store.is_process_local else "was overwritten while it was read"
    with pytest.raises(CheckpointDamaged, match=f"big, written by rank 3, {seen}"):
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {}


@pytest.mark.usefixtures("small_pieces")
def test_an_overwritten_file_is_reported_on_s3(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ETag shows it; the other files are still verified."""
    manifest = upload_whole(s3_store, tmp_path, {"big": BIG, "other": b"1"})
    overwrite_after_the_first_range(monkeypatch, s3_store, manifest)
    damage = find_damage(s3_store.storage, manifest.uuid, manifest.files)
    assert [(each.entry.path, each.was_overwritten) for each in damage] == [("big", True)]


@pytest.mark.usefixtures("small_pieces")
def test_one_version_is_read_in_a_versioned_bucket(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read to its end as it was at the first range."""
    bucket = s3_store.url.split("/")[2]
    versioning = {"Status": "Enabled"}
    s3_store.storage._fs.call_s3(
        "put_bucket_versioning", Bucket=bucket, VersioningConfiguration=versioning
    )
    manifest = upload_whole(s3_store, tmp_path)
    overwrite_after_the_first_range(monkeypatch, s3_store, manifest)
    fetch_files(s3_store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {"big": BIG}


@pytest.mark.usefixtures("small_pieces")
def test_a_file_truncated_after_the_listing_is_damage(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage shows the new size."""
    manifest = upload_whole(s3_store, tmp_path)
    sizes = Storage.sizes

    def truncate_then_say(storage: Storage, folder: str) -> dict[str, int]:
        there = sizes(storage, folder)
        s3_store.storage.write(layout.file_key(manifest.uuid, "big"), BIG[:130])
        return there

    monkeypatch.setattr(Storage, "sizes", truncate_then_say)
    damage = s3_store.find_damage(manifest.uuid, manifest.files)
    assert [(each.entry.path, each.seen_bytes) for each in damage] == [("big", 130)]


def garble(
    monkeypatch: pytest.MonkeyPatch, store: CheckpointStore, manifest: Manifest
) -> list[int]:
    """Flip a bit in transit, in so many reads of the start of ``big`` as the list's number says."""
    key, left = layout.file_key(manifest.uuid, "big"), [0]
    read_into, read = store.storage.read_into, store.storage.read

    def read_into_garbled(
        of: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        piece = read_into(of, start, view, stop, version)
        if of == key and start == 0 and left[0]:
            left[0] -= 1
            view[0] ^= 1
        return piece

    def read_garbled(of: str) -> bytes | None:
        data = read(of)
        if of != key or not data or not left[0]:
            return data
        left[0] -= 1
        return bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(store.storage, "read_into", read_into_garbled)
    monkeypatch.setattr(store.storage, "read", read_garbled)
    return left


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("reader", ["fetch", "verify", "read a file"])
def test_a_bit_that_flips_in_transit_is_no_damage(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The file is read a second time. What differs twice is damage, and noted."""
    manifest = upload_whole(local_store, tmp_path, {"big": BIG, "other": b"1"})
    local_store.commit(manifest)
    seen: dict[str, bytes | None] = {}

    def find() -> None:
        if reader == "fetch":
            fetch_files(local_store, manifest.uuid, manifest.files, tmp_path / "target")
            seen.update(stored_files(tmp_path / "target"))
        elif reader == "verify":
            local_store.verify(manifest.uuid)
        else:
            seen["big"] = local_store.read_file(manifest, "big")

    left = garble(monkeypatch, local_store, manifest)
    left[0] = 2
    with pytest.raises(CheckpointDamaged, match="big, written by rank 3, has digest"):
        find()
    note = layout.damage_key(manifest.uuid, "big")
    assert [*local_store.storage.sizes(layout.DAMAGES)] == [note]
    left[0] = 1
    find()
    assert left == [0]
    assert seen.get("big", BIG) == BIG


def test_a_note_of_damage_goes_when_verify_finds_the_file_whole(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A file was put back, or its reader's memory was at fault. Notes of other files stay."""
    manifest = upload_whole(local_store, tmp_path, {"big": BIG, "other": b"1"})
    local_store.commit(manifest)
    keys = [layout.file_key(manifest.uuid, path) for path in ("big", "other")]
    for key in keys:
        local_store.storage.write(key, bytes(local_store.storage.sizes("checkpoints")[key]))
    with pytest.raises(CheckpointDamaged):
        local_store.verify(manifest.uuid)
    assert len(noted_damage(local_store.storage, manifest.uuid, manifest.files)) == 2
    local_store.storage.write(keys[0], BIG)
    with pytest.raises(CheckpointDamaged, match="other, written"):
        local_store.verify(manifest.uuid)
    noted = noted_damage(local_store.storage, manifest.uuid, manifest.files)
    assert [each.path for each in noted] == ["other"]
