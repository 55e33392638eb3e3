"""obstore gets the settings of the s3fs client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from trial_core.storage.obstore_options import UntranslatableError, s3_store

OPTIONS = {"endpoint_url": "http://127.0.0.1:9", "key": "the-key", "secret": "the-secret"}


def translated(**options: Any) -> Any:
    """obstore's store for s3fs with these options; no request is sent."""
    fs = S3FileSystem(**{**OPTIONS, **options}, skip_instance_cache=True)
    return s3_store(fs, "bucket", for_reading=True)


def credentials(store: Any) -> tuple[str, str, str | None]:
    given = store.credential_provider()
    return given["access_key_id"], given["secret_access_key"], given["token"]


def test_obstore_connects_as_s3fs_does() -> None:
    """Server, region, credentials, timeouts and number of retries are the same."""
    store = translated(
        token="the-token",
        client_kwargs={"region_name": "eu-x"},
        config_kwargs={"connect_timeout": 3, "read_timeout": 7, "retries": {"max_attempts": 4}},
    )
    assert store.config["endpoint"] == "http://127.0.0.1:9"
    assert store.config["region"] == "eu-x"
    assert credentials(store) == ("the-key", "the-secret", "the-token")
    assert store.client_options["connect_timeout"].startswith("3s")
    assert store.client_options["read_timeout"].startswith("7s")
    assert store.retry_config["max_retries"] == 4


def test_obstore_signs_as_s3fs_does() -> None:
    """Payload signing, anonymous access and requester-pays are the same."""
    unsigned = {"s3": {"payload_signing_enabled": False}}
    assert translated().config["unsigned_payload"] in (False, "false")
    assert translated(config_kwargs=unsigned).config["unsigned_payload"] in (True, "true")
    anonymous = translated(anon=True)
    assert anonymous.config["skip_signature"] in (True, "true")
    assert anonymous.credential_provider is None
    assert translated(requester_pays=True).config["request_payer"] in (True, "true", "requester")


def test_obstore_uses_the_credentials_that_botocore_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile works for obstore too."""
    (tmp_path / "credentials").write_text(
        "[one]\naws_access_key_id = profile-key\naws_secret_access_key = profile-secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    store = translated(key=None, secret=None, profile="one")
    assert credentials(store) == ("profile-key", "profile-secret", None)


def test_virtual_hosted_addresses_are_kept() -> None:
    """If s3fs puts the bucket into the host name, obstore does too."""
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
def test_the_region_of_an_amazon_bucket_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, url: str | None, region: str, endpoint: str
) -> None:
    """s3fs follows Amazon's redirects; obstore needs the bucket's region."""
    monkeypatch.setattr(
        S3FileSystem, "call_s3", lambda *_, **__: {"BucketRegion": region}, raising=True
    )
    store = translated(endpoint_url=url)
    assert (store.config["endpoint"], store.config["region"]) == (endpoint, region)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3_additional_kwargs"),
        ({"config_kwargs": {"proxies": {"http": "http://proxy"}}}, "proxies"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "use_accelerate_endpoint"),
    ],
)
def test_an_unsupported_setting_is_named(options: dict[str, Any], name: str) -> None:
    """No setting of the user is silently dropped."""
    with pytest.raises(UntranslatableError, match=name):
        translated(**options)
