from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.open_storage import ENGINE_VARIABLE


@pytest.fixture(params=["s3fs", "obstore"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine that moves bytes to and from S3, for stores opened in the test."""
    name: str = request.param
    monkeypatch.setenv(ENGINE_VARIABLE, name)
    return name


@pytest.fixture(params=["file", "memory", "s3fs"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of storage. Where bytes are moved, S3 by way of obstore is one more."""
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
    server: S3Server = request.getfixturevalue("moto_s3")
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)


@pytest.fixture(params=["moto_s3", pytest.param("ceph_s3", marks=pytest.mark.gateway)])
def s3_store(request: pytest.FixtureRequest, engine: str) -> CheckpointStore:
    """An empty store on each S3 server, with each engine."""
    server: S3Server = request.getfixturevalue(request.param)
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)


@pytest.fixture
def local_store(tmp_path: Path) -> CheckpointStore:
    """An empty store in a folder: ``tmp_path / "local"``."""
    return CheckpointStore(str(tmp_path / "local"))
