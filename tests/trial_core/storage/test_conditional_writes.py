"""`Storage.has_conditional_writes` finds out by probing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Plan
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.storage.base import PROBES
from trial_core.storage.open_storage import open_storage


@pytest.mark.parametrize("url", ["memory://probed", "{folder}/storage"])
def test_memory_and_disks_have_conditional_writes(tmp_path: Path, url: str) -> None:
    """The probe leaves no objects."""
    storage = open_storage(url.format(folder=tmp_path))
    assert storage.has_conditional_writes()
    assert storage.sizes(PROBES) == {}


def test_a_disk_without_hard_links_has_none(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some network file systems, other machines do not see the lock used instead."""

    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert not local_store.storage.has_conditional_writes()
    assert local_store.storage.sizes(PROBES) == {}


def test_an_s3_server_with_conditional_writes_is_recognised(s3_store: CheckpointStore) -> None:
    """The probe leaves no objects."""
    assert s3_store.storage.has_conditional_writes()
    assert s3_store.storage.sizes(PROBES) == {}


def test_a_server_that_ignores_the_condition_is_recognised(moto_s3: S3Server) -> None:
    """Such a server overwrites the object and reports success."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        storage = open_storage(server.new_bucket(), server.options)
        assert not storage.has_conditional_writes()
        assert storage.sizes(PROBES) == {}


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
        storage.has_conditional_writes()
    assert storage.sizes(PROBES) == {}


def test_a_server_is_probed_once(moto_s3: S3Server) -> None:
    """The result is cached."""
    with faulty_s3(moto_s3) as endpoint:
        server = endpoint.server()
        storage = open_storage(server.new_bucket(), server.options)
        storage.has_conditional_writes()
        plan = endpoint.new_plan()
        assert storage.has_conditional_writes()
        assert plan.seen == []


def test_other_file_systems_are_not_trusted(tmp_path: Path) -> None:
    """fsspec looks first and writes then, so a probe without a second writer would succeed."""
    with planned(tmp_path.name, Plan()) as plan:
        storage = open_storage(f"faulty://{tmp_path.name}{tmp_path}/storage")
        assert not storage.has_conditional_writes()
        assert plan.seen == []
