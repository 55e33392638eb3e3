"""The login to a server that trialflow starts: a password that only this user can read.

The password is in a file that is named for the server's port. So a later command finds the password
of the server that PREFECT_API_URL names. It sends that password only if a process of this user
listens there: a server that was killed leaves its file, and its port to other users.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from trial_core.errors import ConfigError

HOST = "127.0.0.1"
LOGIN_PATH = "/trialflow"
LISTENERS = Path("/proc/net/tcp")
"""Where Linux lists sockets with their owners."""


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
    return f"trialflow:{secrets.token_urlsafe(24)}"


def password_path(home: Path, port: int) -> Path:
    return home / f"trialflow-{port}.password"


def find_password(home: Path, api_url: str, chosen: str | None = None) -> str | None:
    """The password of the server at `api_url`; None if trialflow did not start it with `home`.

    Args:
        chosen: the password that is set; it may belong to another server than that of `home`.

    Raises:
        ConfigError: see `find_login`; or `api_url` is not a URL.
    """
    at = urlsplit(api_url)
    try:
        port = at.port or 80
    except ValueError as error:
        raise ConfigError(f"PREFECT_API_URL: {api_url} is no URL: {error}") from None
    if at.hostname != HOST:
        return None
    if chosen and chosen != stored_password(password_path(home, port)):
        return None
    return find_login(home, api_url).password or None


def find_login(home: Path, api_url: str) -> ServerLogin:
    """Return the login to the server at `api_url`, which trialflow started with `home`.

    The password is empty if its file cannot be read.

    Raises:
        ConfigError: no process of this user listens there, so it is another server; or the system
            does not tell.
    """
    port = urlsplit(api_url).port or 80
    path = password_path(home, port)
    password = stored_password(path)
    if password and not listens_for_this_user(port):
        raise ConfigError(
            f"no process of this user (id {os.geteuid()}) listens on {HOST}:{port}, so the "
            f"password in {path} was not used. Its server has ended: unset PREFECT_API_URL, or "
            "delete the file if that address now is another server that you trust. If it runs "
            "on another machine with the same PREFECT_HOME, set PREFECT_HOME to a local folder"
        )
    return ServerLogin(password, path)


def stored_password(path: Path) -> str:
    """The password in a file; empty if it cannot be read."""
    with suppress(FileNotFoundError, PermissionError):
        return path.read_text().strip()
    return ""


def listens_for_this_user(port: int) -> bool:
    """Return whether a process of this user listens on the port of 127.0.0.1; True if not on Linux.

    While it does, no connection to this port can reach another user's process.

    Raises:
        ConfigError: the system does not tell.
    """
    if sys.platform != "linux":
        return True
    address = int.from_bytes(socket.inet_aton(HOST), sys.byteorder)
    # The fields are explained in proc(5). The owner is the user who has created the socket.
    wanted = (f"{address:08X}:{port:04X}", "0A", str(os.geteuid()))
    try:
        rows = [line.split() for line in LISTENERS.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(
            f"which user's process listens on {HOST}:{port} cannot be told: {error}; so a stored "
            "password was not sent there. If you trust the server, set PREFECT_API_AUTH_STRING"
        ) from error
    return wanted in [(row[1], row[3], row[7]) for row in rows[1:]]
