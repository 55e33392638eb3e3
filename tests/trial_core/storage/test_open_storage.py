from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.manifests import FILES, stored_files, upload
from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.storage.obstore_storage import ObstoreS3Storage
from trial_core.storage.open_storage import ENGINE_VARIABLE, open_storage
from trial_core.storage.s3fs_storage import S3Storage
from trial_core.transfer.fetch import fetch_files
from trial_core.transfer.upload import upload_files

OPTIONS = {"endpoint_url": "http://127.0.0.1:9", "key": "the-key", "secret": "the-secret"}


@pytest.mark.parametrize(
    ("engine", "is_installed", "expected"),
    [
        (None, True, ObstoreS3Storage),
        (None, False, S3Storage),
        ("auto", True, ObstoreS3Storage),
        ("s3fs", True, S3Storage),
        ("obstore", True, ObstoreS3Storage),
    ],
)
def test_obstore_is_used_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, engine: str | None, is_installed: bool, expected: type
) -> None:
    """The environment variable can choose s3fs instead."""
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    if engine is not None:
        monkeypatch.setenv(ENGINE_VARIABLE, engine)
    if not is_installed:
        hide_obstore(monkeypatch)
    assert type(open_storage("s3://bucket/x", OPTIONS)) is expected


def hide_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else find_spec(name)
    )


def test_a_missing_or_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, or which engines exist."""
    hide_obstore(monkeypatch)
    monkeypatch.setenv(ENGINE_VARIABLE, "obstore")
    with pytest.raises(StorageError, match=r"pip install 'trialflow\[obstore\]'"):
        open_storage("s3://bucket/x", OPTIONS)
    monkeypatch.setenv(ENGINE_VARIABLE, "boto9")
    with pytest.raises(StorageError, match="one of auto, s3fs, obstore, got 'boto9'"):
        open_storage("s3://bucket/x", OPTIONS)


def test_a_local_storage_imports_nothing_of_s3(tmp_path: Path) -> None:
    """Neither s3fs nor obstore is imported for a local folder."""
    code = (
        "import sys; from trial_core.checkpoint.store import CheckpointStore;"
        f"CheckpointStore({str(tmp_path)!r}).list();"
        "print([m for m in ('s3fs', 'botocore', 'obstore') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_s3fs_is_used_if_obstore_does_not_support_an_option(
    moto_s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A debug line says so; if obstore is required, it is an error."""
    encrypted = {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}
    options = {**moto_s3.options, **encrypted}
    monkeypatch.setenv(ENGINE_VARIABLE, "auto")
    store = CheckpointStore(moto_s3.new_bucket(), options)
    with caplog.at_level(logging.DEBUG, logger="trial_core"):
        manifest = upload(store, tmp_path / "staging")
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == FILES
    assert caplog.text.count("does not support s3_additional_kwargs; s3fs is used instead") == 1
    monkeypatch.setenv(ENGINE_VARIABLE, "obstore")
    with pytest.raises(StorageError, match="does not support s3_additional_kwargs; unset"):
        upload_files(CheckpointStore(store.url, options), "u", tmp_path / "staging", 0)


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
