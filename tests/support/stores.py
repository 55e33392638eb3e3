"""Fixtures: empty checkpoint stores of each kind.

By default each kind of storage, each S3 server and each engine is used once; the other combinations
are long tests.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Plan
from tests.support.s3 import S3Server
from trial_core.checkpoint import storage_lock
from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.base import Storage
from trial_core.storage.local import MemoryStorage
from trial_core.storage.open_storage import ENGINE_VARIABLE

long = pytest.mark.long
gateway = pytest.mark.gateway


@pytest.fixture(params=["obstore", pytest.param("s3fs", marks=long)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of S3 stores that the test opens."""
    name: str = request.param
    monkeypatch.setenv(ENGINE_VARIABLE, name)
    return name


@pytest.fixture(
    params=["file", "obstore", pytest.param("memory", marks=long), pytest.param("s3fs", marks=long)]
)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of storage; for S3, its engine."""
    name: str = request.param
    return name


@pytest.fixture
def store(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    """An empty store of that kind."""
    if kind == "file":
        return CheckpointStore(f"file://{tmp_path}/a store")
    if kind == "memory":
        return CheckpointStore(f"memory://{uuid.uuid4()}")
    monkeypatch.setenv(ENGINE_VARIABLE, kind)
    return _new_store(request.getfixturevalue("moto_s3"))


@pytest.fixture(
    params=[
        ("moto_s3", "obstore"),
        pytest.param(("moto_s3", "s3fs"), marks=long),
        pytest.param(("ceph_s3", "s3fs"), marks=gateway),
        pytest.param(("ceph_s3", "obstore"), marks=[gateway, long]),
    ],
    ids="-".join,
)
def s3_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """An empty store on an S3 server, with one of the engines."""
    server, engine = request.param
    monkeypatch.setenv(ENGINE_VARIABLE, engine)
    return _new_store(request.getfixturevalue(server))


@pytest.fixture
def s3fs_store(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """An empty store on moto, with the engine s3fs."""
    monkeypatch.setenv(ENGINE_VARIABLE, "s3fs")
    return _new_store(moto_s3)


@pytest.fixture
def local_store(tmp_path: Path) -> CheckpointStore:
    """An empty store in a folder: ``tmp_path / "local"``."""
    return CheckpointStore(str(tmp_path / "local"))


@pytest.fixture
def unknown_store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store on an unknown file system: it has no conditional writes."""
    with planned(tmp_path.name, Plan()):
        yield CheckpointStore(f"faulty://{tmp_path.name}{tmp_path}/storage")


@pytest.fixture
def memory_without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages in memory have no conditional writes: every create overwrites.

    As an S3 server that ignores `If-None-Match`. Locks are polled often, because actors take turns.
    """
    monkeypatch.setattr(MemoryStorage, "_probe_conditional_writes", lambda self: False)
    monkeypatch.setattr(MemoryStorage, "_create", Storage._put_small)
    monkeypatch.setattr(storage_lock, "_POLL_SECONDS", 0.0005)
    monkeypatch.setattr(storage_lock, "_MAX_POLL_SECONDS", 0.0005)


def _new_store(server: S3Server) -> CheckpointStore:
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)
