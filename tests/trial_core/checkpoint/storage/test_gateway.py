"""Against a real S3 gateway: behaviour that moto only imitates."""

from __future__ import annotations

import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from s3fs import S3FileSystem

from tests.support.s3 import S3Server
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.errors import StorageError

pytestmark = pytest.mark.gateway
WRITERS = 16


@pytest.fixture
def storage(ceph_s3: S3Server) -> Storage:
    options = {**ceph_s3.options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    return open_storage(f"{ceph_s3.new_bucket()}/folder", options)


def test_one_of_many_concurrent_writers_creates_the_object(storage: Storage) -> None:
    """The object holds the bytes of the writer that was told it succeeded."""
    barrier = Barrier(WRITERS)
    contents = [f"{number:02}".encode() for number in range(WRITERS)]  # none begins another one

    def create(number: int) -> int | None:
        barrier.wait()
        try:
            storage.create("manifests/a", contents[number])
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(WRITERS) as pool:
        winners = [each for each in pool.map(create, range(WRITERS)) if each is not None]
    assert storage.read("manifests/a") == b"".join(contents[each] for each in winners)


def test_a_retry_is_told_from_a_conflict(storage: Storage) -> None:
    """The gateway answers both with the same error; the stored bytes differ."""
    storage.create("manifests/a", b"1")
    storage.create("manifests/a", b"1")
    with pytest.raises(FileExistsError):
        storage.create("manifests/a", b"2")


def test_the_server_refuses_a_garbled_small_object(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small objects carry an MD5 that the server compares with the bytes that arrive."""
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    wrong = base64.b64encode(hashlib.md5(b"other").digest())
    storage.write("manifests/a", b"1")
    monkeypatch.setattr(base64, "b64encode", lambda _: wrong)
    with pytest.raises(StorageError):
        storage.write("manifests/a", b"2")
    assert storage.read("manifests/a") == b"1"
