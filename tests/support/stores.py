"""Fixtures: empty checkpoint stores of each kind.

By default each kind of storage is used once, and one S3 server: the real one where servers may
differ, else moto. The other combinations are long tests.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore

long = pytest.mark.long
gateway = pytest.mark.gateway

FOLDER_FIRST = ["file", *(pytest.param(each, marks=long) for each in ("s3", "memory"))]
"""Kinds of storage for tests to which the kind does not matter."""


@pytest.fixture(params=["file", "s3", pytest.param("memory", marks=long)])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of storage."""
    name: str = request.param
    return name


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """An empty store of that kind."""
    if kind == "file":
        return CheckpointStore(f"file://{tmp_path}/a store")
    if kind == "memory":
        return CheckpointStore(f"memory://{uuid.uuid4()}")
    return _new_store(request.getfixturevalue("moto_s3"))


@pytest.fixture(
    params=[
        pytest.param("ceph_s3", marks=gateway),
        pytest.param("moto_s3", marks=long if shutil.which("radosgw") else ()),
    ]
)
def s3_store(request: pytest.FixtureRequest) -> CheckpointStore:
    """An empty store on an S3 server."""
    return _new_store(request.getfixturevalue(request.param))


@pytest.fixture
def moto_store(moto_s3: S3Server) -> CheckpointStore:
    """An empty store on moto."""
    return _new_store(moto_s3)


@pytest.fixture
def local_store(tmp_path: Path) -> CheckpointStore:
    """An empty store in a folder: ``tmp_path / "local"``."""
    return CheckpointStore(str(tmp_path / "local"))


def unmount(root: Path) -> Path:
    """Leave what `umount` leaves of a folder, an empty one; return where its content is now."""
    away = root.with_name(f"{root.name}.away")
    root.rename(away)
    root.mkdir()
    return away


def mount(root: Path) -> None:
    """Undo `unmount`."""
    shutil.rmtree(root)
    root.with_name(f"{root.name}.away").rename(root)


def _new_store(server: S3Server) -> CheckpointStore:
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)
