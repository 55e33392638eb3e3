"""Only the storage's own answer says that an object does not exist: a 404 of a proxy is a failure.

A proxy that has lost the server behind it answers 404 with a page of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem

from tests.support.faults.plan import Fault
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.multipart_uploads import leave_open
from tests.support.s3 import S3Server
from trial_core.checkpoint.storage import s3_requests
from trial_core.checkpoint.storage.base import Storage, StorageSpec
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

KEY = "folder/a"
PAGES = ["404 page not found", "<html><body>404</body></html>", ""]
USES: dict[str, Callable[[Storage], object]] = {
    "read": lambda storage: storage.read(KEY),
    "exists": lambda storage: storage.exists(KEY),
    "list": lambda storage: storage.sizes("folder"),
    "uploads": lambda storage: storage.unfinished_uploads("folder"),
    "create": lambda storage: storage.create("folder/b", b"2"),
    "write": lambda storage: storage.write("folder/b", b"2"),
    "remove": lambda storage: storage.remove(KEY),
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_requests, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def proxy(moto_s3: S3Server) -> Iterator[FaultyS3]:
    with faulty_s3(moto_s3) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def opened(proxy: FaultyS3) -> Storage:
    """A storage behind the proxy."""
    server = proxy.server()
    return open_storage(f"{server.new_bucket()}/some/folder", server.options)


@pytest.fixture
def storage(proxy: FaultyS3, opened: Storage) -> Storage:
    """A storage behind the proxy with one object."""
    proxy.page = FaultyS3.page
    proxy.new_plan()
    opened.clear("folder")
    opened.create(KEY, b"1")
    return opened


@pytest.mark.parametrize("use", USES)
def test_a_404_of_a_proxy_is_retried(proxy: FaultyS3, storage: Storage, use: str) -> None:
    """Once is not noticed, as with a 502 or 503."""
    plan = proxy.new_plan(Fault("page"))
    found = USES[use](storage)
    assert plan.has_struck
    assert found == {"read": b"1", "exists": True, "list": {KEY: 1}, "uploads": []}.get(use)
    assert storage.sizes("folder") == {
        "create": {KEY: 1, "folder/b": 1}, "write": {KEY: 1, "folder/b": 1}, "remove": {},
    }.get(use, {KEY: 1})  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_404_that_stays_is_an_error(proxy: FaultyS3, storage: Storage, use: str) -> None:
    """It says what has answered, and what to check. Nothing counts as absent or deleted."""
    proxy.new_plan(Fault("page", times=None))
    for text in PAGES:
        proxy.page = (404, text)
        with pytest.raises(StorageError, match=r"404 without an S3 error .* proxy .*endpoint_url"):
            USES[use](storage)
    proxy.new_plan()
    assert storage.sizes("folder") == {KEY: 1}


def test_a_404_proves_nothing_of_conditional_writes(proxy: FaultyS3, storage: Storage) -> None:
    """A page in place of the server's refusal to overwrite the probe."""
    storage._is_create_only = False
    proxy.new_plan(Fault("page", first=1, times=None, method="PUT"))
    with pytest.raises(StorageError, match="404 without an S3 error document"):
        storage.check_create_only()


def test_a_404_is_no_aborted_upload(proxy: FaultyS3, storage: Storage) -> None:
    """The unfinished upload still takes space."""
    leave_open(CheckpointStore.from_spec(storage.spec), "folder/b")
    proxy.new_plan(Fault("page", times=None, method="DELETE", key="uploadId"))
    with pytest.raises(StorageError, match="404 without an S3 error document"):
        storage.abort_uploads("folder")
    proxy.new_plan()
    assert storage.abort_uploads("folder") == 1


def test_a_page_is_no_listing(proxy: FaultyS3, storage: Storage) -> None:
    """Well-formed, and with status 200: for example a form to log in."""
    proxy.page = (200, "<html><body>Please log in</body></html>")
    proxy.new_plan(Fault("page", times=None))
    with pytest.raises(StorageError, match="not an S3 listing"):
        storage.sizes("folder")


def test_a_404_hides_no_later_attempt(proxy: FaultyS3, storage: Storage) -> None:
    """Nor a checkpoint to resume from."""
    store = CheckpointStore.from_spec(storage.spec)
    first, _ = store.take_over("t", "one"), store.take_over("t", "another")
    proxy.new_plan(Fault("page", times=None, key="list-type"))
    for look in (first.is_newest, lambda: store.resume_candidates("t")):
        with pytest.raises(StorageError):
            look()


def test_what_is_absent_is_known(s3_store: CheckpointStore) -> None:
    """By the server's own answer, without an error and without a retry."""
    storage = s3_store.storage
    assert storage.read("folder/a") is None
    assert not storage.exists("folder/a")
    assert storage.sizes("folder") == {}
    storage.remove("folder/a")


def test_a_long_listing_is_complete(
    s3_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends it in pages."""
    call, pages = s3_requests.S3Requests.call, []

    async def call_for_two(self: s3_requests.S3Requests, method: str, **arguments: Any) -> Any:
        if method == "list_objects_v2":
            pages.append(arguments)
            arguments["MaxKeys"] = 2
        return await call(self, method, **arguments)

    monkeypatch.setattr(s3_requests.S3Requests, "call", call_for_two)
    for number in range(5):
        s3_store.storage.write(f"folder/ä {number}", bytes(number))
    assert s3_store.storage.sizes("folder") == {f"folder/ä {n}": n for n in range(5)}
    assert len(pages) == 3


class HidingFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """As gcsfs: any 404 is a FileNotFoundError, and a listing is one request."""

    protocol = "gs"
    cachable = False
    listed: tuple[str, ...] = ()
    reason: BaseException | None = None

    async def _cat_file(self, path: str, **_: Any) -> bytes:
        if isinstance(self.reason, NoRange):
            raise self.reason
        raise FileNotFoundError(path) from self.reason

    async def _find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        return {each: {"size": 1} for each in self.listed}


class NoRange(OSError):
    """As gcsfs's HttpError."""

    code = 416


class AzureError(Exception):
    """As azure.core's HttpResponseError."""

    def __init__(self, error_code: str | None) -> None:
        self.error_code = error_code


@pytest.mark.parametrize(
    ("listed", "reason", "is_absence"),
    [
        ((), None, True),
        (("bucket/a",), None, False),
        (("bucket/a",), AzureError("BlobNotFound"), True),
        ((), AzureError("ContainerNotFound"), False),
        (("bucket/a",), AzureError(None), False),
    ],
)
def test_google_and_azure(
    listed: tuple[str, ...], reason: BaseException | None, is_absence: bool
) -> None:
    """Azure's reply has a code. gcsfs drops Google's reply, so a listing decides."""
    fs = HidingFileSystem()
    fs.listed, fs.reason = listed, reason
    storage = Storage(StorageSpec("gs://bucket"), fs, "bucket")
    if is_absence:
        assert storage.read("a") is None
    else:
        with pytest.raises(StorageError, match="cannot read a in gs://bucket"):
            storage.read("a")


def test_an_empty_object_of_google() -> None:
    """It has no range, and Google answers a ranged read with 416."""
    fs = HidingFileSystem()
    fs.reason = NoRange()
    assert Storage(StorageSpec("gs://bucket"), fs, "bucket").read("a") == b""


def test_a_removed_object_may_be_created_again_at_once(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, just after the storage has said that there is none to delete."""
    storage = local_store.storage
    delete = storage.delete

    def delete_then_create(key: str) -> None:
        try:
            delete(key)
        finally:
            storage.write(key, b"another's")

    monkeypatch.setattr(storage, "delete", delete_then_create)
    storage.remove("folder/object")
    assert storage.read("folder/object") == b"another's"
