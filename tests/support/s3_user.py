"""A user of the S3 gateway whose key is in a file that another program rewrites."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.s3 import S3Server


class S3User:
    """The user, in whose file `credentials` processes that are started now find the key.

    Attributes:
        key: the access key that the gateway takes.
        url: a bucket of theirs.
        options: of a storage there, without the key.
    """

    def __init__(self, server: S3Server, folder: Path) -> None:
        self._server, self._file = server, folder / "credentials"
        self._uid, self.key = f"--uid={uuid.uuid4()}", uuid.uuid4().hex
        self._admin("user", "create", "--display-name=other", *self._key_arguments())
        mine = replace(server, access_key=self.key, secret_key=self.secret)
        self.url = mine.new_bucket()
        self.options: dict[str, Any] = {"endpoint_url": server.endpoint_url}
        self.write_file()

    @property
    def secret(self) -> str:
        return f"secret-{self.key}"

    def rotate(self) -> None:
        """Get another key; the old one counts no more. The file still has the old one."""
        old, self.key = self.key, uuid.uuid4().hex
        self._admin("key", "create", *self._key_arguments())
        self._admin("key", "rm", f"--access-key={old}")

    def write_file(self, text: str | None = None) -> None:
        """Write the key into the file, or another text."""
        keys = f"aws_access_key_id = {self.key}\naws_secret_access_key = {self.secret}\n"
        self._file.write_text(f"[default]\n{keys}" if text is None else text)

    def end(self) -> None:
        self._admin("user", "rm", "--purge-data")

    def _key_arguments(self) -> list[str]:
        return [f"--access-key={self.key}", f"--secret-key={self.secret}"]

    def _admin(self, *command: str) -> None:
        self._server.admin(*command, self._uid)


@contextmanager
def s3_user(server: S3Server, folder: Path) -> Iterator[S3User]:
    """A new user; this process and those that it starts use the file in `folder`."""
    others = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "AWS_CONFIG_FILE": str(folder / "config"),
    }
    with patch.dict(os.environ, files):
        for name in others:
            os.environ.pop(name, None)
        user = S3User(server, folder)
        try:
            yield user
        finally:
            user.end()
