"""Whether a storage keeps what is there is found out by trying."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Plan
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.base import Storage


@pytest.mark.parametrize("url", ["memory://probed", "{folder}/storage"])
def test_memory_and_disks(tmp_path: Path, url: str) -> None:
    """They create exclusively; nothing is left of the probe."""
    storage = CheckpointStore(url.format(folder=tmp_path)).storage
    assert storage.has_conditional_writes()
    assert storage.sizes(layout.PROBES) == {}


def test_a_disk_without_hard_links(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of some network file systems, on which the kernel's lock holds for one machine alone."""

    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert not local_store.storage.has_conditional_writes()
    assert local_store.storage.sizes(layout.PROBES) == {}


def test_a_server_that_keeps_the_condition(s3_store: CheckpointStore) -> None:
    """It is asked, and nothing of that is left."""
    assert s3_store.storage.has_conditional_writes()
    assert s3_store.storage.sizes(layout.PROBES) == {}


def test_a_server_that_does_not_know_the_condition(moto_s3: S3Server) -> None:
    """It writes over what is there, and says that all went well."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        storage = CheckpointStore(server.new_bucket(), server.options).storage
        assert not storage.has_conditional_writes()
        assert storage.sizes(layout.PROBES) == {}


def test_a_server_that_is_overloaded_for_once(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses as one does that keeps the condition; that does not make it one."""
    create, asked = Storage.create, []

    def refusing_once(self: Storage, key: str, data: bytes) -> None:
        asked.append(data)
        if len(asked) == 2:
            raise FileExistsError("SlowDown")
        create(self, key, data)

    monkeypatch.setattr(Storage, "create", refusing_once)
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        storage = CheckpointStore(server.new_bucket(), server.options).storage
        assert not storage.has_conditional_writes()


def test_a_server_is_asked_once(moto_s3: S3Server) -> None:
    """The answer is remembered."""
    with faulty_s3(moto_s3) as endpoint:
        server = endpoint.server()
        storage = CheckpointStore(server.new_bucket(), server.options).storage
        storage.has_conditional_writes()
        plan = endpoint.new_plan()
        assert storage.has_conditional_writes()
        assert plan.seen == []


def test_other_file_systems_are_not_trusted(tmp_path: Path) -> None:
    """fsspec itself looks first and writes then: alone it would pass any probe."""
    with planned(tmp_path.name, Plan()) as plan:
        storage = CheckpointStore(f"faulty://{tmp_path.name}{tmp_path}/storage").storage
        assert not storage.has_conditional_writes()
        assert plan.seen == []
