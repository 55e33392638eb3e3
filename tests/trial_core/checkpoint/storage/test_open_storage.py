from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError


def test_a_local_storage_imports_nothing_of_s3(tmp_path: Path) -> None:
    """s3fs is not imported for a local folder."""
    code = (
        "import sys; from trial_core.checkpoint.store import CheckpointStore;"
        f"CheckpointStore({str(tmp_path)!r}).list();"
        "print([m for m in ('s3fs', 'botocore') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match="pip install gcsfs"):
        open_storage("gs://bucket/folder")


def test_an_unknown_protocol_is_refused() -> None:
    """The error suggests the nearest protocol."""
    with pytest.raises(StorageError, match=r"unknown protocol s33://; did you mean s3://\? use"):
        open_storage("s33://bucket")


def test_an_s3_url_without_a_bucket_is_refused() -> None:
    """It is refused before any request."""
    with pytest.raises(StorageError, match="names no bucket"):
        open_storage("s3://")


def test_a_local_folder_may_be_a_path(tmp_path: Path) -> None:
    """As everywhere in Python, not only text."""
    assert CheckpointStore(tmp_path).url == f"file://{tmp_path}"
