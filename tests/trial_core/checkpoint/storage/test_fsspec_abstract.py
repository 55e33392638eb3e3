"""fsspec's own suite for file systems, on those that storages use, as trialflow configures them.

trialflow has no file system of its own: `Storage` is a small interface over fsspec's. So a release
of fsspec or s3fs that breaks what these promise is found here. The one file system that this
repository implements, the faulty one of the tests, must pass as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.tests.abstract as abstract
import pytest

from tests.support.faults.filesystem import PROTOCOL, planned
from tests.support.faults.plan import Plan
from tests.support.s3 import S3Server
from trial_core.checkpoint.storage.open_storage import open_storage


class _Local(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, tmp_path: Path) -> Any:
        fs = open_storage(str(tmp_path))._fs
        fs.auto_mkdir = True
        return fs

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path / "remote")


class _S3(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def url(self, ceph_s3: S3Server) -> str:
        return ceph_s3.new_bucket()

    @pytest.fixture
    def fs(self, ceph_s3: S3Server, url: str) -> Any:
        return open_storage(url, ceph_s3.options)._fs

    @pytest.fixture
    def fs_path(self, url: str) -> str:
        return url.removeprefix("s3://")

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class _Faulty(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self) -> Iterator[Any]:
        with planned("whole", Plan()):
            yield open_storage(f"{PROTOCOL}://whole/")._fs

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"whole{tmp_path}/remote"


class _Suite(
    abstract.AbstractCopyTests, abstract.AbstractGetTests, abstract.AbstractOpenTests,
    abstract.AbstractPipeTests, abstract.AbstractPutTests,
):  # type: ignore[misc]  # fmt: skip
    """All of fsspec's tests."""


class TestLocal(_Suite, _Local):
    """``file://``. Made as `LocalStorage` uses it, but folders as the suite expects them."""


@pytest.mark.long
class TestFaulty(_Suite, _Faulty):
    """The file system that tests use in place of ``gs://`` and ``az://``, without a fault."""


@pytest.mark.gateway
@pytest.mark.long
class TestS3(_Suite, _S3):
    """``s3://``, on the gateway."""

    @pytest.mark.xfail(
        reason="s3fs raises OSError(EINVAL) for PreconditionFailed; `Storage` looks what is there",
        strict=True,
    )
    def test_pipe_exclusive(self, fs: Any, fs_target: str) -> None:
        """As fsspec's."""
        super().test_pipe_exclusive(fs, fs_target)

    @pytest.mark.xfail(
        reason="s3fs looks when the file is closed, not when it is opened; `Storage` opens none",
        strict=True,
    )
    def test_open_exclusive(self, fs: Any, fs_target: str) -> None:
        """As fsspec's."""
        super().test_open_exclusive(fs, fs_target)
