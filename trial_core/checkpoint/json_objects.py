"""What is left in the storage for others to read: small JSON objects that say who, and when."""

from __future__ import annotations

import contextlib
import getpass
import socket
from datetime import datetime, timedelta, timezone

import msgspec


def user_at_host() -> str:
    """Who runs this process: ``user@host``."""
    user = "unknown"
    with contextlib.suppress(OSError, KeyError):  # a container may have no name for its user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def is_older(at: str, age: timedelta) -> bool:
    """Whether a time as a manifest writes it lies further back than `age`."""
    # Python 3.10 does not read the Z.
    moment = datetime.fromisoformat(at.replace("Z", "+00:00"))
    return datetime.now(timezone.utc) - moment > age


def encode_json(value: msgspec.Struct) -> bytes:
    """What is stored: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
