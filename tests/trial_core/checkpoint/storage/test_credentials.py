from __future__ import annotations

import traceback

import pytest

from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.storage.credentials import secrets_in, without_credentials
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.errors import StorageError

SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("s3://me:p@ss@bucket/x", "s3://bucket/x"),
        ("s3://me:p/ss@bucket/x@y", "s3://bucket/x@y"),
        ("https://me:12345/abc@host/x", "https://host/x"),
        ("ssh://[::1]:2222/a@b/c", "ssh://[::1]:2222/a@b/c"),
        ("sftp://host:22/data@v2", "sftp://host:22/data@v2"),
        ("simplecache::s3://me:p/s?s@bucket/x", "simplecache::s3://bucket/x"),
        ("https://host:80/x?sig=1", "https://host:80/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
        ("abfs://box@me.dfs.core.windows.net/p?st=1", "abfs://box@me.dfs.core.windows.net/p"),
        ("file:///what?/me:you@here", "file:///what?/me:you@here"),
        ("/what?", "/what?"),
    ],
)
def test_a_url_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    """The location stays complete."""
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
    """Neither a message, nor a traceback, nor the repr of a spec holds a credential."""
    errors = ErrorTranslator(url, options)
    with pytest.raises(StorageError) as caught, errors.translated("write to"):
        raise OSError(f"403 for {SECRET}")
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown + errors.url + repr(StorageSpec(url, options))
    assert "403 for ***" in str(caught.value)


def test_passwords_with_a_slash_or_of_digits_are_masked() -> None:
    """YAML takes digits for a number. Other numbers are no secrets."""
    options = {"password": 98765432, "block_size": 1048576, "auth": {"is_anonymous": True}}
    assert secrets_in("sftp://me:p/ss@host/x", options) == ["98765432", "p/ss"]


def test_which_kind_of_secret_it_is_is_no_secret() -> None:
    """Nor is an author."""
    plain = ("signature_version", "KAFKA_SASL_MECHANISM", "TOKEN_MODEL", "AUTHOR", "TOKENIZER")
    secret = ("signature_value", "AUTHORIZATION")
    assert secrets_in("", dict.fromkeys(plain, "plain")) == []
    for name in secret:
        assert secrets_in("", {name: SECRET}) == [SECRET]
