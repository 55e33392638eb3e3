"""The login to a server that trialflow starts: a password that only this user can read.

The password is in a file that is named for the server's port. So a later command finds the password
of the server that PREFECT_API_URL names.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

HOST = "127.0.0.1"
LOGIN_PATH = "/trialflow"


@dataclass(frozen=True)
class ServerLogin:
    """The login to one server.

    Attributes:
        password: in Prefect's form ``user:password``.
        path: the file that contains it while the server runs.
    """

    password: str = field(repr=False)
    path: Path

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Keep the password in its file, which only this user can read, for the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)  # of a server that was killed
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{self.password}\n")
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)

    def link(self, page_url: str) -> str:
        """A link that logs the browser in and opens the page `page_url` of the server's UI.

        It contains the password, in the fragment, which browsers do not send.
        """
        page = urlsplit(page_url)
        return page._replace(
            path=f"{LOGIN_PATH}{page.path or '/'}", fragment=quote(self.password, safe=":")
        ).geturl()


def new_password() -> str:
    """A random password."""
    return f"trialflow:{secrets.token_urlsafe(24)}"


def password_path(home: Path, port: int) -> Path:
    """The file with the password of the server on `port`."""
    return home / f"trialflow-{port}.password"


def find_password(home: Path, api_url: str) -> str | None:
    """The password of the server at `api_url`; None if trialflow did not start it with `home`."""
    if urlsplit(api_url).hostname == HOST:
        return find_login(home, api_url).password or None
    return None


def find_login(home: Path, api_url: str) -> ServerLogin:
    """The login to the server at `api_url`, which trialflow started with `home`.

    The password is empty if its file cannot be read.
    """
    path = password_path(home, urlsplit(api_url).port or 80)
    with suppress(FileNotFoundError, PermissionError):
        return ServerLogin(path.read_text().strip(), path)
    return ServerLogin("", path)
