from __future__ import annotations

import traceback

import pytest

from trial_core.errors import StorageError
from trial_core.storage.base import StorageSpec
from trial_core.storage.credentials import without_credentials
from trial_core.storage.storage_errors import ErrorTranslator

SECRET = "hunter2-hunter2"


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
