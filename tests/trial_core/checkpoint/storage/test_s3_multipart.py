"""Multipart uploads to S3, on moto and on a real gateway."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.manifests import stage, upload
from tests.support.multipart_uploads import leave_open
from tests.support.s3 import S3Server
from trial_core.checkpoint.storage import buffer_pool, s3_storage
from trial_core.checkpoint.storage.local_files import read_at
from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled
from trial_core.checkpoint.storage.s3_requests import S3Requests
from trial_core.checkpoint.storage.s3_storage import S3Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import CheckpointError, StorageError

PART = 5 * 2**20  # the smallest part that S3 accepts
BIG = os.urandom(PART) * 3 + b"the rest"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "PIECE_BYTES", PART)


def storage_of(store: CheckpointStore) -> S3Storage:
    assert isinstance(store.storage, S3Storage)
    return store.storage


def unfinished(store: CheckpointStore) -> list[str]:
    """The keys of all unfinished multipart uploads in the store's bucket."""
    storage = storage_of(store)
    found = storage._fs.call_s3("list_multipart_uploads", Bucket=storage._bucket)
    return [each["Key"] for each in found.get("Uploads", [])]


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> list[str]:
    """Make requests of one method fail; return the list of all methods sent from now on."""
    sent: list[str] = []
    call = S3Requests.call

    async def call_or_fail(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        sent.append(name)
        if name == method:
            raise error
        return await call(requests, name, **arguments)

    monkeypatch.setattr(S3Requests, "call", call_or_fail)
    return sent


def after_pieces(monkeypatch: pytest.MonkeyPatch, count: int, do: Callable[[], object]) -> None:
    """Call `do` after `count` pieces of files have been read."""
    numbers = iter(range(1, 1000))

    def read_and_do(*arguments: Any) -> int:
        size_bytes = read_at(*arguments)
        if next(numbers) == count:
            do()
        return size_bytes

    monkeypatch.setattr(s3_storage, "read_at", read_and_do)


def test_files_of_any_size_are_uploaded_whole(s3_store: CheckpointStore, tmp_path: Path) -> None:
    """Several parts with a shorter last one, equal parts, one part, one byte, no byte."""
    files = {"rest": BIG, "even": BIG[: 2 * PART], "one": BIG[:PART], "small": b"1", "empty": b""}
    manifest = upload(s3_store, tmp_path / "staging", files)
    assert {each.path: each.size_bytes for each in manifest.files} == {
        name: len(data) for name, data in files.items()
    }
    assert {each.digest for each in manifest.files} == {
        f"sha256:{hashlib.sha256(data).hexdigest()}" for data in files.values()
    }
    assert s3_store.find_damage(manifest.uuid, manifest.files) == []
    assert unfinished(s3_store) == []


def test_parts_are_named_in_their_order(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 refuses an upload whose parts are not; threads may take the pieces in another one."""
    store = CheckpointStore(moto_s3.new_bucket(), moto_s3.options)
    buffers, numbers, another_has_read = storage_of(store).buffers, itertools.count(), Event()
    lent = buffers.lent

    @contextmanager
    def first_waits(*arguments: Any) -> Iterator[Any]:
        with lent(*arguments) as buffer:
            if next(numbers) == 0:
                assert another_has_read.wait(60)
            yield buffer

    monkeypatch.setattr(buffers, "lent", first_waits)
    after_pieces(monkeypatch, 1, another_has_read.set)
    named: list[int] = []
    call = S3Requests.call

    async def note(requests: S3Requests, method: str, **arguments: Any) -> dict[str, Any]:
        parts = arguments.get("MultipartUpload", {}).get("Parts", [])
        named.extend(part["PartNumber"] for part in parts)
        return await call(requests, method, **arguments)

    monkeypatch.setattr(S3Requests, "call", note)
    source = stage(tmp_path / "staging", {"big": BIG}) / "big"
    store.storage.upload(source, "checkpoints/u/big", CancelSignal())
    assert named == [1, 2, 3, 4]
    assert store.storage.read("checkpoints/u/big") == BIG


class UnexpectedError(Exception):
    """An error that no code handles."""


@pytest.mark.parametrize("error", [UnexpectedError("boom"), KeyboardInterrupt(), WorkCancelled()])
def test_a_failed_upload_leaves_nothing(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """No object, no unfinished upload, and all buffers are released, whatever the error."""
    stop = CancelSignal()

    def fail() -> None:
        if not isinstance(error, WorkCancelled):
            raise error
        stop.set()  # as when another file of the call has failed

    after_pieces(monkeypatch, 3, fail)
    source = stage(tmp_path / "staging", {"big": BIG}) / "big"
    with pytest.raises(type(error)):
        s3_store.storage.upload(source, "checkpoints/u/big", stop)
    assert unfinished(s3_store) == []
    assert s3_store.storage.sizes("checkpoints") == {}
    for _ in range(buffer_pool.POOL_BUFFERS):
        s3_store.storage.buffers.acquire(0, CancelSignal())


def test_a_file_that_shrinks_leaves_nothing(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is truncated during its upload is an error, and nothing is stored."""
    staging = stage(tmp_path / "staging", {"big": BIG})
    after_pieces(monkeypatch, 1, lambda: os.truncate(staging / "big", 10))
    with pytest.raises(CheckpointError, match="big changed while it was uploaded"):
        upload_files(s3_store, "u", staging, 0)
    assert unfinished(s3_store) == []
    assert s3_store.storage.sizes("checkpoints") == {}


INTERRUPTED = """
import sys, threading
from pathlib import Path
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.storage import buffer_pool, s3_storage
from trial_core.checkpoint.transfer.upload import upload_files
buffer_pool.PIECE_BYTES = 5 * 2**20
read_at, numbers = s3_storage.read_at, iter(range(1, 1000))
def wait_after_the_third(*arguments):
    size_bytes = read_at(*arguments)
    if next(numbers) == 3:
        print("begun", flush=True)
        threading.Event().wait(0.5)
    return size_bytes
s3_storage.read_at = wait_after_the_third
store = CheckpointStore(sys.argv[1], dict(zip(("endpoint_url", "key", "secret"), sys.argv[2:5])))
try:
    upload_files(store, "u", Path(sys.argv[5]), 0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_leaves_nothing(moto_s3: S3Server, tmp_path: Path) -> None:
    """An interrupted process aborts its uploads before it ends."""
    store = CheckpointStore(f"{moto_s3.new_bucket()}/folder", moto_s3.options)
    staging = stage(tmp_path / "staging", {"a": BIG, "b": BIG})
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, f"s3://{store.url.partition('://')[2]}",
         *moto_s3.options.values(), str(staging)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert unfinished(store) == []


@pytest.mark.parametrize(
    "method", ["create_multipart_upload", "upload_part", "complete_multipart_upload"]
)
def test_a_failed_request_aborts_the_upload(
    moto_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The first cause is raised, and no upload is left unfinished."""
    sent = fail_at(monkeypatch, method, OSError("the cause"))
    with pytest.raises(StorageError, match="the cause"):
        upload_files(moto_store, "u", stage(tmp_path / "staging", {"big": BIG}), 0)
    assert "list_multipart_uploads" in sent
    assert unfinished(moto_store) == []


def test_a_failed_abort_does_not_hide_the_cause(
    moto_store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first cause is raised, a warning is logged, and the next sweep aborts the upload."""
    moto_store.announce_upload("t", "u", "attempt-1")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fail_at(patch, "abort_multipart_upload", OSError("no abort"))
        after_pieces(patch, 3, lambda: (_ for _ in ()).throw(OSError("the cause")).__next__())
        with pytest.raises(StorageError, match="the cause"):
            upload_files(moto_store, "u", stage(tmp_path / "staging", {"big": BIG}), 0)
    assert "was not aborted; it may take space until the trial runs again" in caplog.text
    assert len(unfinished(moto_store)) == 1
    assert [each.uploads for each in moto_store.sweep("t")] == [1]
    assert unfinished(moto_store) == []


@pytest.mark.parametrize("aborted", ["checkpoints/u/own-1", "checkpoints/u/own-10"])
def test_a_failed_upload_aborts_no_other(moto_store: CheckpointStore, aborted: str) -> None:
    """One key may be the prefix of another rank's key."""
    storage = storage_of(moto_store)
    keys = {name: storage._key(f"checkpoints/u/{name}") for name in ("own-1", "own-10")}
    for key in keys.values():
        storage._fs.call_s3("create_multipart_upload", Bucket=storage._bucket, Key=key)
    storage._abort(storage._key(aborted), None)
    assert set(unfinished(moto_store)) == set(keys.values()) - {storage._key(aborted)}
    assert storage.abort_uploads("checkpoints/u") == 1


def test_only_earlier_uploads_are_aborted(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one of the folder neither is aborted nor protects the others."""
    store = CheckpointStore(moto_s3.new_bucket(), moto_s3.options)
    now, listed = datetime.now(timezone.utc), S3Requests.unfinished

    async def with_times(requests: S3Requests, prefix: str) -> list[dict[str, Any]]:
        found = await listed(requests, prefix)  # moto begins all in 2010
        return [{**each, "Initiated": now} if "own" in each["Key"] else each for each in found]

    monkeypatch.setattr(S3Requests, "unfinished", with_times)
    for name in ("dead", "own"):
        leave_open(store, f"runs/t/{name}")
    assert store.storage.abort_uploads("runs/t", now) == 1
    assert unfinished(store) == ["runs/t/own"]
