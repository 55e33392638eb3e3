from __future__ import annotations

import socket
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from tests.support.manifests import stage
from tests.support.s3 import S3Server
from trial_core.checkpoint.storage import storage_errors
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator, is_refusal, retry_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import StorageError

NO_RETRIES = {"connect_timeout": 1, "read_timeout": 0.2, "retries": {"max_attempts": 0}}


def upload_a_file(url: str, options: dict[str, Any], tmp_path: Path) -> None:
    upload_files(CheckpointStore(url, options), "u", stage(tmp_path / "staging", {"a": b"1"}), 0)


def test_a_folder_below_a_file_is_explained(tmp_path: Path) -> None:
    """The error names the path and what to correct."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*/file/x: .* not a folder: correct"):
        open_storage(f"file://{tmp_path}/file/x").check_usable()


def test_a_missing_bucket_is_explained(moto_s3: S3Server) -> None:
    """Both writing and listing say that the bucket is missing."""
    storage = open_storage("s3://no-such-bucket/folder", moto_s3.options)
    for use in (storage.check_usable, lambda: storage.sizes("x")):
        with pytest.raises(StorageError, match="bucket does not exist: create it"):
            use()


def test_an_unreachable_server_is_explained() -> None:
    """The error shows the address."""
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    storage = open_storage("s3://bucket", {**options, "config_kwargs": NO_RETRIES})
    with pytest.raises(StorageError, match=r"cannot be reached: check .*http://127\.0\.0\.1:9"):
        storage.check_usable()


def test_a_silent_server_is_explained(tmp_path: Path) -> None:
    """The connection may be slow, so the error names the option that raises the time limit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {
            "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}",
            "key": "k",
            "secret": "s",
            "config_kwargs": NO_RETRIES,
        }
        with pytest.raises(StorageError, match=r"stopped answering: .*config_kwargs: {read_tim"):
            upload_a_file("s3://bucket", options, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, r"cannot be reached: check .*endpoint_url"),
        ({"bucket": "s3://no-such-bucket"}, "bucket does not exist: create it"),
    ],
)
def test_a_failed_upload_is_explained(
    moto_s3: S3Server, tmp_path: Path, wrong: dict[str, str], why: str
) -> None:
    """The message is one line."""
    options = {**moto_s3.options, "config_kwargs": NO_RETRIES, **wrong}
    url = options.pop("bucket", None) or moto_s3.new_bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3FileSystem, "retries", 1)
        with pytest.raises(StorageError, match=why) as caught:
            upload_a_file(url, options, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.gateway
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"key": "no-such-key"}, "does not know the access key"),
        ({"secret": "wrong"}, "secret key does not match"),
    ],
)
def test_wrong_credentials_are_explained(
    ceph_s3: S3Server, tmp_path: Path, wrong: dict[str, str], why: str
) -> None:
    """The error says which half is wrong; neither message nor traceback shows the secret."""
    with pytest.raises(StorageError, match=why) as caught:
        upload_a_file(ceph_s3.new_bucket(), {**ceph_s3.options, **wrong}, tmp_path)
    assert ceph_s3.secret_key not in "".join(traceback.format_exception(caught.value))


def test_missing_credentials_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where credentials are looked for."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    storage = open_storage("s3://bucket", {"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match=r"no credentials were found: .*AWS_ACCESS_KEY_ID"):
        storage.check_usable()


def test_a_missing_profile_is_explained() -> None:
    """The profile is looked up early, but the error is a StorageError all the same."""
    with pytest.raises(StorageError, match="profile does not exist: check the credentials"):
        open_storage("s3://bucket", {"profile": "no-such-profile"}).check_usable()


def test_an_unknown_option_is_named(moto_s3: S3Server) -> None:
    """A misspelt option is shown."""
    storage = open_storage(moto_s3.new_bucket(), {**moto_s3.options, "endpont": "x"})
    with pytest.raises(StorageError, match=r"does not know one of its options.*endpont"):
        storage.check_usable()


def test_the_cause_is_kept_if_it_holds_no_credentials() -> None:
    """The storage's own traceback helps to debug."""
    with pytest.raises(StorageError) as caught, ErrorTranslator("s3://b").translated("write to"):
        raise PermissionError("no")
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, True), (403, True), (404, True), (408, False), (425, False), (429, False),
        (500, False), (501, True), (503, False),
    ],
)  # fmt: skip
def test_a_busy_server_has_not_refused(status: int, expected: bool) -> None:
    """It may accept the same request later; other requests that it answers with 4xx, it never
    will."""
    reply = {"Error": {"Code": "Failed"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert is_refusal(ClientError(reply, "PutObject")) == expected


def fails() -> NoReturn:
    raise StorageError("the disk is full")


def test_a_storage_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, with pauses; then the error is raised."""
    monkeypatch.setattr(storage_errors, "PAUSE_SECONDS", 0.0)
    tries: list[int] = []

    def persist() -> NoReturn:
        tries.append(1)
        fails()

    with pytest.raises(StorageError, match="the disk is full"):
        retry_storage(persist)
    assert len(tries) == storage_errors.TRIES
    remaining = iter([fails, lambda: "stored"])
    assert retry_storage(lambda: next(remaining)()) == "stored"
