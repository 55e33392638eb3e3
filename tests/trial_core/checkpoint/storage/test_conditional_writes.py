"""A storage whose writes cannot be create-only is refused. `Storage.check_create_only` probes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Fault, Plan
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.s3 import S3Server
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.storage.base import PROBES
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

ADVICE = r"Two runs of one trial could both commit there: use Amazon S3, an S3 server with"


@pytest.fixture(scope="module")
def proxy(moto_s3: S3Server) -> Iterator[FaultyS3]:
    with faulty_s3(moto_s3) as endpoint:
        yield endpoint


@pytest.fixture
def behind_proxy(proxy: FaultyS3) -> Iterator[CheckpointStore]:
    """An empty store behind the proxy, which forgets what a test has set."""
    proxy.new_plan()
    server = proxy.server()
    yield CheckpointStore(server.new_bucket(), server.options)
    proxy.ignored = proxy.not_implemented = frozenset()


@pytest.mark.parametrize("url", ["memory://probed", "{folder}/storage"])
def test_memory_and_disks_can_be_used(tmp_path: Path, url: str) -> None:
    """The probe leaves no objects."""
    storage = open_storage(url.format(folder=tmp_path))
    storage.check_create_only()
    assert storage.sizes(PROBES) == {}


def test_a_disk_without_hard_links_is_refused(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock would be an alternative that other machines do not always see."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match=rf"no hard links \[.*not permitted\]\. {ADVICE}"):
        local_store.storage.check_usable()
    assert local_store.storage.sizes(PROBES) == {}


def test_an_s3_server_with_conditional_writes_can_be_used(s3_store: CheckpointStore) -> None:
    """The probe leaves no objects."""
    s3_store.storage.check_create_only()
    assert s3_store.storage.sizes(PROBES) == {}


def test_a_server_that_ignores_the_condition_is_refused(
    proxy: FaultyS3, behind_proxy: CheckpointStore
) -> None:
    """Such a server overwrites the object and reports success. The error has its name."""
    proxy.ignored = frozenset({"if-none-match"})
    with pytest.raises(
        StorageError, match=rf"its server \(.*aiohttp/.*\) ignores the condition.*\. {ADVICE}"
    ):
        behind_proxy.storage.check_usable()
    assert behind_proxy.storage.sizes(PROBES) == {}


def test_a_server_that_does_not_know_the_condition_is_refused(
    proxy: FaultyS3, behind_proxy: CheckpointStore
) -> None:
    """It answers 501 to each conditional write. The error has its name and its words."""
    proxy.not_implemented = frozenset({"if-none-match"})
    with pytest.raises(
        StorageError, match=rf"\(.*aiohttp/.*\) refuses conditional .*injected\]\. {ADVICE}"
    ):
        behind_proxy.storage.check_usable()
    assert behind_proxy.storage.sizes(PROBES) == {}


@pytest.mark.parametrize("status", [500, 503, 429, None])
def test_a_server_that_fails_proves_nothing(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    """It refuses every write, whether or not it knows conditions. None: it does not answer."""
    storage = open_storage(moto_s3.new_bucket(), moto_s3.options)
    reply = {"Error": {"Code": "Failed"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    create = storage._create

    def failing(path: str, data: bytes) -> None:
        if data == b"second":
            raise OSError(errno.EIO, "Failed") from (
                ClientError(reply, "PutObject") if status else ConnectionResetError()
            )
        create(path, data)

    monkeypatch.setattr(storage, "_create", failing)
    with pytest.raises(StorageError, match=r"cannot write probes/"):
        storage.check_create_only()
    assert storage.sizes(PROBES) == {}


def test_a_lost_reply_proves_nothing(proxy: FaultyS3, behind_proxy: CheckpointStore) -> None:
    """The client's retry is refused, because its first request was carried out."""
    plan = proxy.new_plan(Fault("lose reply", method="PUT"))
    behind_proxy.storage.check_create_only()
    assert plan.has_struck


def test_a_server_is_probed_once(proxy: FaultyS3, behind_proxy: CheckpointStore) -> None:
    """The result is kept."""
    behind_proxy.storage.check_create_only()
    plan = proxy.new_plan()
    behind_proxy.storage.check_create_only()
    assert plan.seen == []


def test_an_empty_object_is_not_overwritten(store: CheckpointStore) -> None:
    """Of two creators, one succeeds: an empty object is not one whose write was cut short."""
    store.storage.write("attempts/t/000001.json", b"")
    for data in (b"one", b"another"):
        with pytest.raises(FileExistsError, match=r"attempts/t/000001\.json exists in"):
            store.storage.create("attempts/t/000001.json", data)
    assert store.storage.read("attempts/t/000001.json") == b""


def test_a_run_on_an_unknown_file_system_is_refused(tmp_path: Path) -> None:
    """fsspec looks first and writes then, so a probe without a second writer would succeed."""
    with planned(tmp_path.name, Plan(), is_known=False) as plan:
        store = CheckpointStore(f"faulty://{tmp_path.name}{tmp_path}/storage")
        with (
            pytest.raises(StorageError, match=rf"fsspec looks first and writes then.*\. {ADVICE}"),
            own_trial(store, "t", "attempt"),
        ):
            pass
        assert {seen.method for seen in plan.seen} <= {"ls", "cat_file"}
        assert store.list() == []  # what others have stored there can be read
