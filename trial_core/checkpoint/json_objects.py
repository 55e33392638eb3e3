"""Small JSON objects in the storage, which say who did what, and when."""

from __future__ import annotations

import contextlib
import getpass
import socket
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import msgspec

Record = TypeVar("Record", bound=msgspec.Struct)


def encode_json(value: msgspec.Struct) -> bytes:
    """The bytes to store: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def decode_json(data: bytes, kind: type[Record]) -> Record | None:
    """The stored record; None if it cannot be read.

    A writer that is killed may leave half an object, where the storage has no atomic writes.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def user_at_host() -> str:
    """The user and the machine of this process: ``user@host``."""
    user = "unknown"
    with contextlib.suppress(OSError, KeyError):  # a container may have no name for its user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def age_of(at: str) -> timedelta | None:
    """The time since `at` (ISO 8601, with an offset or Z); None if it is not such a time."""
    try:
        moment = datetime.fromisoformat(at.replace("Z", "+00:00"))  # Python 3.10 does not read Z
    except ValueError:
        return None
    return None if moment.tzinfo is None else datetime.now(timezone.utc) - moment


def is_older(at: str, age: timedelta) -> bool:
    """Whether `at` is longer ago than `age`. An unreadable time is not."""
    seen = age_of(at)
    return seen is not None and seen > age
