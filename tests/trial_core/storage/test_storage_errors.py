from __future__ import annotations

import socket
import sys
import traceback
from pathlib import Path

import pytest

from tests.support.manifests import FILES, stage
from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore, StorageSpec
from trial_core.errors import StorageError
from trial_core.storage.storage_errors import Explainer, of_rank, without_credentials
from trial_core.transfer.files import upload_files

SECRET = "hunter2-hunter2"


def test_a_folder_below_a_file_is_explained(tmp_path: Path) -> None:
    """Storage that cannot be written says so, where, and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*/file/x: .* not a folder: correct"):
        CheckpointStore(f"file://{tmp_path}/file/x").check_writable()


def test_a_missing_bucket_is_explained(moto_s3: S3Server) -> None:
    """Both writing to and listing a bucket that is not there say that it is the bucket."""
    store = CheckpointStore("s3://no-such-bucket/folder", moto_s3.options)
    for use in (store.check_writable, store.list):
        with pytest.raises(StorageError, match="bucket does not exist: create it"):
            use()


def test_a_server_that_is_not_there_is_explained() -> None:
    """The address is shown, and what to look at."""
    store = CheckpointStore(
        "s3://bucket",
        {
            "endpoint_url": "http://127.0.0.1:9",
            "key": "k",
            "secret": "s",
            "config_kwargs": {"retries": {"max_attempts": 0}},
        },
    )
    with pytest.raises(StorageError, match=r"cannot be reached: check .*http://127\.0\.0\.1:9"):
        store.check_writable()


def test_a_server_that_is_silent_is_explained(engine: str, tmp_path: Path) -> None:
    """The way there may only be slow: which option gives it more time is said, whatever moves the
    bytes."""
    patience = {"read_timeout": 0.2, "retries": {"max_attempts": 0}}
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {
            "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}",
            "key": "k",
            "secret": "s",
            "config_kwargs": patience,
        }
        with pytest.raises(StorageError, match=r"stopped answering: .*config_kwargs: {read_tim"):
            upload_files(
                CheckpointStore("s3://bucket", options), "u", stage(tmp_path / "s", FILES), 0
            )


def test_missing_credentials_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the options or the environment: say where they are looked for."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    store = CheckpointStore("s3://bucket", {"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match=r"no credentials were found: .*AWS_ACCESS_KEY_ID"):
        store.check_writable()


def test_a_missing_profile_is_explained() -> None:
    """A profile that nobody has set up is no mystery, however early it is looked for."""
    with pytest.raises(StorageError, match="profile does not exist: check the credentials"):
        CheckpointStore("s3://bucket", {"profile": "no-such-profile"}).check_writable()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage whose package is not installed says what to install."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match="pip install gcsfs"):
        CheckpointStore("gs://bucket/folder")


def test_an_unknown_protocol_is_named() -> None:
    """A slip in the URL is told with what was probably meant."""
    with pytest.raises(StorageError, match=r"called s33://; did you mean s3://"):
        CheckpointStore("s33://bucket")


def test_a_url_without_a_bucket_is_refused() -> None:
    """An S3 storage without a bucket is refused before any request."""
    with pytest.raises(StorageError, match="names no bucket"):
        CheckpointStore("s3://")


def test_a_wrong_option_is_named(moto_s3: S3Server) -> None:
    """An option that the file system does not know is shown."""
    store = CheckpointStore(moto_s3.new_bucket(), {**moto_s3.options, "endpont": "x"})
    with pytest.raises(StorageError, match=r"option .* not one it knows.*endpont"):
        store.check_writable()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("s3://me:p@ss@bucket/x", "s3://bucket/x"),
        ("https://host:80/x?sig=1", "https://host:80/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
        ("abfs://box@me.dfs.core.windows.net/p?st=1", "abfs://box@me.dfs.core.windows.net/p"),
        ("file:///what?/me:you@here", "file:///what?/me:you@here"),
        ("/what?", "/what?"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    """The place whole; a password with its user, and a query, not at all."""
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"ftp://me:{SECRET}@host/x", {}),
        ("s3://b/x", {"key": "me", "secret": SECRET}),
        ("s3://b/x", {"client_kwargs": {"aws_session_token": SECRET}}),
        ("gs://b/x", {"token": {"private_key": SECRET}}),
        ("s3://b/x", {"endpoint_url": f"http://me:{SECRET}@host"}),
        (f"az://b/x?sig={SECRET}", {"sas_token": SECRET}),
    ],
)
def test_credentials_are_never_shown(url: str, options: dict[str, object]) -> None:
    """Neither the message, nor the traceback, nor the repr of a spec gives a credential away."""
    explainer = Explainer(url, options)
    with pytest.raises(StorageError) as caught, explainer.explaining("write to"):
        raise OSError(f"403 for {SECRET}")
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown + explainer.url + repr(StorageSpec(url, options))
    assert "403 for ***" in str(caught.value)


def test_a_cause_that_gives_nothing_away_is_kept() -> None:
    """Whoever debugs finds the storage's own traceback."""
    with pytest.raises(StorageError) as caught, Explainer("s3://b").explaining("write to"):
        raise PermissionError("no")
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_rank_is_named_once() -> None:
    """Also where what went wrong there names it already; rank 1 is not rank 11."""
    assert of_rank(1, "rank 1 saved a file") == "rank 1 saved a file"
    assert of_rank(1, "the disk is full") == "rank 1: the disk is full"
    assert of_rank(1, "rank 11 is gone") == "rank 1: rank 11 is gone"
