from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3 import S3Server
from tests.trial_core.models.helpers import memory_store
from trial_core.checkpoint.store import CheckpointStore


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.gateway)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """An empty store on each kind of storage."""
    if request.param == "file":
        return CheckpointStore(f"file://{tmp_path}/a store")
    if request.param == "memory":
        return CheckpointStore(f"memory://{uuid.uuid4()}")
    server: S3Server = request.getfixturevalue("ceph_s3")
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)


@pytest.fixture
def local_store(tmp_path: Path) -> CheckpointStore:
    """An empty store in a folder: ``tmp_path / "local"``."""
    return CheckpointStore(str(tmp_path / "local"))


@pytest.fixture
def store_in_memory() -> Iterator[CheckpointStore]:
    """An empty store in memory."""
    with memory_store() as store:
        yield store
