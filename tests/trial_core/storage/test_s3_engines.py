"""Which engine moves bytes to and from S3, and that obstore is told what s3fs was."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.support.manifests import FILES, stage, stored_files, upload
from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.storage.obstore_options import UntranslatableError, s3_store
from trial_core.storage.obstore_s3 import ObstoreS3Storage
from trial_core.storage.open_storage import ENGINE_VARIABLE
from trial_core.storage.s3 import S3Storage
from trial_core.transfer.files import fetch_files, upload_files

KEYS = {"key": "the-access-key", "secret": "the-secret-key"}
HERE = {"endpoint_url": "http://127.0.0.1:9", **KEYS}
UNKNOWN_TO_OBSTORE = {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}


@pytest.mark.parametrize(
    ("asked", "installed", "kind"),
    [
        (None, True, ObstoreS3Storage),
        (None, False, S3Storage),
        ("auto", True, ObstoreS3Storage),
        ("s3fs", True, S3Storage),
        ("obstore", True, ObstoreS3Storage),
    ],
)
def test_obstore_is_used_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, installed: bool, kind: type
) -> None:
    """Unless s3fs is asked for."""
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(ENGINE_VARIABLE, asked)
    if not installed:
        without_obstore(monkeypatch)
    assert type(CheckpointStore("s3://bucket/x", HERE).storage) is kind


def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else find_spec(name)
    )


def test_an_engine_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, and which engines there are."""
    without_obstore(monkeypatch)
    monkeypatch.setenv(ENGINE_VARIABLE, "obstore")
    with pytest.raises(StorageError, match=r"pip install 'trialflow\[obstore\]'"):
        CheckpointStore("s3://bucket/x", HERE)
    monkeypatch.setenv(ENGINE_VARIABLE, "boto9")
    with pytest.raises(StorageError, match="one of auto, s3fs, obstore, got 'boto9'"):
        CheckpointStore("s3://bucket/x", HERE)


def test_local_disks_need_neither(tmp_path: Path) -> None:
    """Nothing of S3 is imported for a storage that is none."""
    code = (
        "import sys; from trial_core.checkpoint.store import CheckpointStore;"
        f"CheckpointStore({str(tmp_path)!r}).list();"
        "print([m for m in ('s3fs', 'botocore', 'obstore') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_what_obstore_cannot_be_told_s3fs_does(
    moto_s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a fuss: a line for who looks for it. Who insists on obstore is told why not."""
    options = {**moto_s3.options, **UNKNOWN_TO_OBSTORE}
    monkeypatch.setenv(ENGINE_VARIABLE, "auto")
    store = CheckpointStore(moto_s3.new_bucket(), options)
    with caplog.at_level(logging.DEBUG, logger="trial_core"):
        manifest = upload(store, tmp_path / "staging")
        fetch_files(store, manifest.uuid, manifest.files, tmp_path / "target")
    assert stored_files(tmp_path / "target") == FILES
    assert caplog.text.count("it has no word for s3_additional_kwargs, so s3fs is") == 1
    monkeypatch.setenv(ENGINE_VARIABLE, "obstore")
    with pytest.raises(StorageError, match="no word for s3_additional_kwargs; leave the choice"):
        upload_files(CheckpointStore(store.url, options), "u", tmp_path / "staging", 0)


def translated(**options: Any) -> Any:
    """obstore's bucket for what s3fs was told; no request is sent."""
    fs = S3FileSystem(**{**HERE, **options}, skip_instance_cache=True)
    return s3_store(fs, "bucket", for_reading=True)


def credentials(store: Any) -> tuple[str, str, str | None]:
    given = store.credential_provider()
    return given["access_key_id"], given["secret_access_key"], given["token"]


def test_obstore_goes_where_s3fs_goes() -> None:
    """The same server, region, credentials, limits on time, and number of attempts."""
    store = translated(
        token="the-token",
        client_kwargs={"region_name": "eu-x"},
        config_kwargs={"connect_timeout": 3, "read_timeout": 7, "retries": {"max_attempts": 4}},
    )
    assert store.config["endpoint"] == "http://127.0.0.1:9"
    assert store.config["region"] == "eu-x"
    assert credentials(store) == ("the-access-key", "the-secret-key", "the-token")
    assert store.client_options["connect_timeout"].startswith("3s")
    assert store.client_options["read_timeout"].startswith("7s")
    assert store.retry_config["max_retries"] == 4


def test_obstore_signs_as_s3fs_does() -> None:
    """Whether payloads are signed, whether anything is, and who pays."""
    unsigned = {"s3": {"payload_signing_enabled": False}}
    assert translated().config["unsigned_payload"] in (False, "false")
    assert translated(config_kwargs=unsigned).config["unsigned_payload"] in (True, "true")
    anonymous = translated(anon=True)
    assert anonymous.config["skip_signature"] in (True, "true")
    assert anonymous.credential_provider is None
    assert translated(requester_pays=True).config["request_payer"] in (True, "true", "requester")


def test_obstore_finds_credentials_where_s3fs_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a profile, say: botocore looks, whoever asks."""
    (tmp_path / "credentials").write_text(
        "[one]\naws_access_key_id = profile-key\naws_secret_access_key = profile-secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    store = translated(key=None, secret=None, profile="one")
    assert credentials(store) == ("profile-key", "profile-secret", None)


def test_virtual_hosts_are_kept() -> None:
    """Where the bucket is part of the host's name for s3fs it is for obstore."""
    store = translated(
        endpoint_url="https://s3.example.org",
        config_kwargs={"s3": {"addressing_style": "virtual"}},
    )
    assert store.config["endpoint"] == "https://bucket.s3.example.org"
    assert store.config["virtual_hosted_style_request"] in (True, "true")


@pytest.mark.parametrize(
    ("url", "region", "endpoint"),
    [
        (None, "eu-west-3", "https://s3.eu-west-3.amazonaws.com"),
        ("https://s3.cn-north-1.amazonaws.com.cn", "cn-north-1",
         "https://s3.cn-north-1.amazonaws.com.cn"),
    ],
)  # fmt: skip
def test_amazon_is_asked_where_a_bucket_is(
    monkeypatch: pytest.MonkeyPatch, url: str | None, region: str, endpoint: str
) -> None:
    """s3fs follows Amazon's redirections; obstore goes to the bucket's region at once."""
    monkeypatch.setattr(
        S3FileSystem, "call_s3", lambda *_, **__: {"BucketRegion": region}, raising=True
    )
    store = translated(endpoint_url=url)
    assert (store.config["endpoint"], store.config["region"]) == (endpoint, region)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (UNKNOWN_TO_OBSTORE, "s3_additional_kwargs"),
        ({"config_kwargs": {"proxies": {"http": "http://proxy"}}}, "proxies"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "use_accelerate_endpoint"),
    ],
)
def test_what_has_no_translation_is_named(options: dict[str, Any], word: str) -> None:
    """Nothing that the user has said is passed over."""
    with pytest.raises(UntranslatableError, match=word):
        translated(**options)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, r"cannot be reached: check .*endpoint_url"),
        ({"bucket": "s3://no-such-bucket"}, "bucket does not exist: create it"),
    ],
)
def test_what_goes_wrong_is_explained(
    moto_s3: S3Server, engine: str, tmp_path: Path, wrong: dict[str, str], why: str
) -> None:
    """In the same words, whoever moved the bytes; and briefly."""
    options = {
        **moto_s3.options,
        "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
        **wrong,
    }
    url = options.pop("bucket", None) or moto_s3.new_bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3FileSystem, "retries", 1)
        with pytest.raises(StorageError, match=why) as caught:
            upload_files(
                CheckpointStore(url, options), "u", stage(tmp_path / "staging", {"a": b"1"}), 0
            )
    assert "\n" not in str(caught.value)


@pytest.mark.gateway
@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"key": "nobody-here"}, "access key is not known"), ({"secret": "wrong"}, "does not fit")],
)
def test_wrong_credentials_are_explained(
    ceph_s3: S3Server, engine: str, tmp_path: Path, wrong: dict[str, str], why: str
) -> None:
    """Which half is wrong is said, neither is shown, not in a traceback either."""
    store = CheckpointStore(ceph_s3.new_bucket(), {**ceph_s3.options, **wrong})
    with pytest.raises(StorageError, match=why) as caught:
        upload_files(store, "u", stage(tmp_path / "staging", {"a": b"1"}), 0)
    assert ceph_s3.secret_key not in "".join(traceback.format_exception(caught.value))
