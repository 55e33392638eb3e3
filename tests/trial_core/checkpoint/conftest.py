from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """An empty store of each kind."""
    if request.param == "file":
        return CheckpointStore(f"file://{tmp_path}/a store")
    if request.param == "memory":
        return CheckpointStore(f"memory://{uuid.uuid4()}")
    server: S3Server = request.getfixturevalue("moto_s3")
    return CheckpointStore(f"{server.new_bucket()}/some/folder", server.options)


@pytest.fixture
def local_store(tmp_path: Path) -> CheckpointStore:
    """An empty store in a folder: ``tmp_path / "local"``."""
    return CheckpointStore(str(tmp_path / "local"))
