"""Uploads to S3 in parts, on moto and on a real gateway, with each engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import stage, upload
from tests.support.s3 import S3Server
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError
from trial_core.storage import buffer_pool
from trial_core.storage.parallel import StopSignal, WorkCancelled
from trial_core.storage.s3 import S3Storage
from trial_core.storage.s3_requests import S3Requests
from trial_core.storage.s3_upload import end_uploads
from trial_core.transfer.files import upload_files, verify_files

PART = 5 * 2**20  # S3 takes no smaller ones
BIG = os.urandom(PART) * 3 + b"the rest"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "PIECE_BYTES", PART)


def storage_of(store: CheckpointStore) -> S3Storage:
    assert isinstance(store.storage, S3Storage)
    return store.storage


def unfinished(store: CheckpointStore) -> list[str]:
    """The keys of all multipart uploads in the store's bucket that have not ended."""
    storage = storage_of(store)
    found = storage._fs.call_s3("list_multipart_uploads", Bucket=storage._bucket)
    return [each["Key"] for each in found.get("Uploads", [])]


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> list[str]:
    """From now on that request of s3fs's client fails; the list says which were sent."""
    sent: list[str] = []
    call = S3Requests._call

    async def call_or_fail(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        sent.append(name)
        if name == method:
            raise error
        return await call(requests, name, **arguments)

    monkeypatch.setattr(S3Requests, "_call", call_or_fail)
    return sent


def after_pieces(monkeypatch: pytest.MonkeyPatch, count: int, do: Callable[[], object]) -> None:
    """Do something when so many pieces of files have been read."""
    read_piece, read = buffer_pool.read_piece, iter(range(1, 1000))

    def read_and_do(*arguments: Any) -> bool:
        whole = read_piece(*arguments)
        if next(read) == count:
            do()
        return whole

    for module in ("window", "s3_storage"):
        monkeypatch.setattr(f"trial_core.checkpoint.{module}.read_piece", read_and_do)


def test_a_big_file_is_whole(s3_store: CheckpointStore, tmp_path: Path) -> None:
    """Sent in parts of which the last is shorter, and in parts of which all are as long."""
    files = {"rest": BIG, "even": BIG[: 2 * PART], "one": BIG[:PART], "small": b"1", "empty": b""}
    manifest = upload(s3_store, tmp_path / "staging", files)
    assert {each.path: each.size_bytes for each in manifest.files} == {
        name: len(data) for name, data in files.items()
    }
    assert {each.digest for each in manifest.files} == {
        f"sha256:{hashlib.sha256(data).hexdigest()}" for data in files.values()
    }
    verify_files(s3_store, manifest.uuid, manifest.files)
    assert unfinished(s3_store) == []


def test_parts_are_what_goes_over_the_window(s3_store: CheckpointStore, tmp_path: Path) -> None:
    """Files of parts were sent in parts, small ones in one request: their ETags tell."""
    manifest = upload(s3_store, tmp_path / "staging", {"big": BIG, "one": BIG[:PART]})
    storage = storage_of(s3_store)
    parts = {}
    for each in manifest.files:
        key = storage._key(layout.file_key(manifest.uuid, each.path))
        head = storage._fs.call_s3("head_object", Bucket=storage._bucket, Key=key)
        parts[each.path] = head["ETag"].strip('"').partition("-")[2]
    assert parts == {"big": "4", "one": ""}


class Odd(Exception):
    """Nobody's error."""


@pytest.mark.parametrize("error", [Odd("boom"), KeyboardInterrupt()])
def test_an_upload_that_breaks_off_leaves_nothing(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever is raised in the middle of it: no object, no unfinished upload, all buffers back."""

    def fail() -> None:
        raise error

    after_pieces(monkeypatch, 3, fail)
    with pytest.raises(type(error)):
        storage_of(s3_store).upload(
            stage(tmp_path / "staging", {"big": BIG}) / "big", "checkpoints/u/big", StopSignal()
        )
    assert unfinished(s3_store) == []
    assert s3_store.storage.sizes("checkpoints") == {}
    for _ in range(buffer_pool.WINDOW_PIECES):
        s3_store.storage.window.take(0, StopSignal())


def test_an_upload_that_is_stopped_leaves_nothing(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because another file has failed, say."""
    stop = StopSignal()
    after_pieces(monkeypatch, 2, stop.set)
    with pytest.raises(WorkCancelled):
        storage_of(s3_store).upload(
            stage(tmp_path / "staging", {"big": BIG}) / "big", "checkpoints/u/big", stop
        )
    assert unfinished(s3_store) == []
    assert s3_store.storage.sizes("checkpoints") == {}


def test_a_file_that_shrinks_leaves_nothing(
    s3_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated while it is uploaded: that is said, and nothing stored."""
    staging = stage(tmp_path / "staging", {"big": BIG})
    after_pieces(monkeypatch, 1, lambda: os.truncate(staging / "big", 10))
    with pytest.raises(CheckpointError, match="big changed while it was uploaded"):
        upload_files(s3_store, "u", staging, 0)
    assert unfinished(s3_store) == []
    assert s3_store.storage.sizes("checkpoints") == {}


def test_what_obstore_leaves_open_is_ended(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It aborts by itself, as long as it knows of the upload and can: both may not be."""
    monkeypatch.setenv("TRIALFLOW_STORAGE_ENGINE", "obstore")
    store = CheckpointStore(moto_s3.new_bucket(), moto_s3.options)
    storage = storage_of(store)

    def begin_and_fail(_: object, key: str, *__: object, **___: object) -> None:
        storage._fs.call_s3("create_multipart_upload", Bucket=storage._bucket, Key=key)
        raise OSError("the cause")

    monkeypatch.setattr("obstore.put", begin_and_fail)
    with pytest.raises(StorageError, match="the cause"):
        upload_files(store, "u", stage(tmp_path / "staging", {"big": BIG}), 0)
    assert unfinished(store) == []


@pytest.mark.gateway
def test_small_objects_carry_a_sum(ceph_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is garbled on its way is refused by the server, which compares."""
    store = CheckpointStore(ceph_s3.new_bucket(), ceph_s3.options)
    wrong = base64.b64encode(hashlib.md5(b"other").digest())
    store.storage.write("manifests/a", b"1")
    monkeypatch.setattr(base64, "b64encode", lambda _: wrong)
    with pytest.raises(StorageError):
        store.storage.write("manifests/a", b"2")
    assert store.storage.read("manifests/a") == b"1"


INTERRUPTED = """
import sys, threading
from pathlib import Path
from trial_core.checkpoint import window
from trial_core.storage.parallel import StopSignal
from trial_core.checkpoint.store import CheckpointStore
from trial_core.transfer.files import upload_files
from trial_core.checkpoint import s3_storage
buffer_pool.PIECE_BYTES = 5 * 2**20
read_piece, read = buffer_pool.read_piece, iter(range(1, 1000))
def slowly(*arguments):
    whole = read_piece(*arguments)
    if next(read) == 3:
        print("begun", flush=True)
        threading.Event().wait(0.5)
    return whole
buffer_pool.read_piece = s3_storage.read_piece = slowly
store = CheckpointStore(sys.argv[1], dict(zip(("endpoint_url", "key", "secret"), sys.argv[2:5])))
try:
    upload_files(store, "u", Path(sys.argv[5]), 0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_leaves_nothing(moto_s3: S3Server, engine: str, tmp_path: Path) -> None:
    """A process that is interrupted in the middle of an upload aborts it before it ends."""
    store = CheckpointStore(f"{moto_s3.new_bucket()}/folder", moto_s3.options)
    staging = stage(tmp_path / "staging", {"a": BIG, "b": BIG})
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, f"s3://{store.url.partition('://')[2]}",
         *moto_s3.options.values(), str(staging)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert unfinished(store) == []


@pytest.fixture
def s3fs_store(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """An empty store on moto, by s3fs alone."""
    monkeypatch.setenv("TRIALFLOW_STORAGE_ENGINE", "s3fs")
    return CheckpointStore(f"{moto_s3.new_bucket()}/some/folder", moto_s3.options)


@pytest.mark.parametrize(
    "method", ["create_multipart_upload", "upload_part", "complete_multipart_upload"]
)
def test_a_request_that_fails_aborts_the_upload(
    s3fs_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The first cause is what is raised, and nothing is left open."""
    sent = fail_at(monkeypatch, method, OSError("the cause"))
    with pytest.raises(StorageError, match="the cause"):
        upload_files(s3fs_store, "u", stage(tmp_path / "staging", {"big": BIG}), 0)
    assert "list_multipart_uploads" in sent
    assert unfinished(s3fs_store) == []


def test_an_abortion_that_fails_hides_no_cause(
    s3fs_store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is left then is said, and found by the next sweep; the first error is raised."""
    s3fs_store.announce_upload("t", "u", "attempt-1")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fail_at(patch, "abort_multipart_upload", OSError("no abortion"))
        after_pieces(patch, 3, lambda: (_ for _ in ()).throw(OSError("the cause")).__next__())
        with pytest.raises(StorageError, match="the cause"):
            upload_files(s3fs_store, "u", stage(tmp_path / "staging", {"big": BIG}), 0)
    assert "was not aborted, and may take space until the trial runs again" in caplog.text
    assert len(unfinished(s3fs_store)) == 1
    assert [each.uploads for each in s3fs_store.sweep("t")] == [1]
    assert unfinished(s3fs_store) == []


@pytest.mark.parametrize("ours", ["checkpoints/u/own-1", "checkpoints/u/own-10"])
def test_an_upload_that_fails_ends_no_other(s3fs_store: CheckpointStore, ours: str) -> None:
    """Also where the key of the one begins as the other's: of two ranks one would fail for the
    other's cause."""
    storage = storage_of(s3fs_store)
    keys = {name: storage._key(f"checkpoints/u/{name}") for name in ("own-1", "own-10")}
    for key in keys.values():
        storage._fs.call_s3("create_multipart_upload", Bucket=storage._bucket, Key=key)
    end_uploads(storage._requests, storage._key(ours), storage._explainer)
    assert set(unfinished(s3fs_store)) == set(keys.values()) - {storage._key(ours)}
    assert storage.end_uploads("checkpoints/u") == 1


def test_a_lost_reply_to_the_last_request_is_no_failure(
    s3fs_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is over, though the client was told there is none: what is stored tells."""
    call = S3Requests._call

    async def lose_the_reply(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        reply = await call(requests, name, **arguments)
        if name == "complete_multipart_upload":
            raise FileNotFoundError("NoSuchUpload")
        return reply

    monkeypatch.setattr(S3Requests, "_call", lose_the_reply)
    manifest = upload(s3fs_store, tmp_path / "staging", {"big": BIG})
    verify_files(s3fs_store, manifest.uuid, manifest.files)


def test_hashing_keeps_off_the_event_loop(
    s3fs_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither digests nor sums of what is sent hold up the connections of others."""
    names: set[str] = set()

    class Watched:
        def __init__(self, *data: bytes) -> None:
            self._hash = hashlib.sha256(*data)

        def update(self, data: memoryview) -> None:
            names.add(threading.current_thread().name)
            self._hash.update(data)

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    class Hashlib:
        sha256 = Watched
        md5 = hashlib.md5

    monkeypatch.setattr("trial_core.storage.s3.hashlib", Hashlib)
    manifest = upload(s3fs_store, tmp_path / "staging", {"big": BIG})
    verify_files(s3fs_store, manifest.uuid, manifest.files)
    assert {name.rpartition("_")[0] for name in names} == {"trialflow-storage"}
    assert asyncio.run(_current_name()) not in names


async def _current_name() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("wanted", [True, False])
def test_sums_are_sent_as_long_as_the_server_compares(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Moto answers with the CRC of each part, as Amazon does. Who does not want them has none."""
    monkeypatch.setenv("TRIALFLOW_STORAGE_ENGINE", "s3fs")
    how = {} if wanted else {"request_checksum_calculation": "when_required"}
    options = {**moto_s3.options, "config_kwargs": how}
    store = CheckpointStore(f"{moto_s3.new_bucket()}/folder", options)
    sums = sums_sent(monkeypatch)
    upload(store, tmp_path / "staging", {"big": BIG})
    assert sums == [wanted] * 4


@pytest.mark.gateway
def test_no_sums_are_sent_in_vain(
    ceph_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceph does not look at them: after its first answer none are computed."""
    monkeypatch.setenv("TRIALFLOW_STORAGE_ENGINE", "s3fs")
    store = CheckpointStore(f"{ceph_s3.new_bucket()}/folder", ceph_s3.options)
    sums = sums_sent(monkeypatch)
    upload(store, tmp_path / "first", {"small": b"1"})
    upload(store, tmp_path / "second", {"big": BIG})
    assert sums == [True, False, False, False, False]


def sums_sent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each request with a body from now on: whether it came with a CRC."""
    sums: list[bool] = []
    call = S3Requests._call

    async def note(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        if "Body" in arguments:
            sums.append("ChecksumCRC32" in arguments)
        return await call(requests, name, **arguments)

    monkeypatch.setattr(S3Requests, "_call", note)
    return sums
