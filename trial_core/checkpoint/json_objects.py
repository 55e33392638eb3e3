"""Small JSON records in the storage, which tell who did something, and when."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import socket
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import msgspec

from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.local_files import TEMPORARY_NAME
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointDamaged

Record = TypeVar("Record", bound=msgspec.Struct)
Name = TypeVar("Name")

_logger = logging.getLogger(__name__)


def encode_json(value: msgspec.Struct | dict[str, Any]) -> bytes:
    """The bytes to store: JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def read_json(
    storage: Storage,
    key: str,
    kind: type[Record],
    unreadable: Record | None = None,
    *,
    is_silent: bool = False,
) -> Record | None:
    """The stored record under a key, or None. `unreadable` is returned, with a warning unless
    `is_silent`, if the object is too large, was altered, or is not trialflow's."""
    try:
        data = storage.read(key)
    except CheckpointDamaged as error:
        if not is_silent:
            _logger.warning("what it may protect is kept: %s", error)
        return unreadable
    if data is None:
        return None
    read = decode_json(data, kind, "" if is_silent else f"{storage.url}/{key}")
    return unreadable if read is None else read


def decode_mapping(data: bytes | str, where: str) -> dict[str, Any]:
    """A stored JSON object of any content. Raises CheckpointDamaged, with its name, for others."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{where} holds {type(found).__name__}, expected a JSON object")
    return found


def decode_json(data: bytes, kind: type[Record], where: str = "") -> Record | None:
    """The stored record; None if it was altered, or is not trialflow's. A warning names its URL,
    `where`, unless that is empty."""
    try:
        return decode(data, kind)
    except msgspec.MsgspecError as error:
        if where:
            _logger.warning(
                "%s is not a readable %s, and what it may protect is kept; delete it if no run is "
                "writing it: %s",
                where, kind.__name__, error,
            )  # fmt: skip
        return None


def named_keys(
    storage: Storage, folder: str, parse: Callable[[str], Name | None]
) -> list[tuple[str, Name]]:
    """The keys of a folder's objects, sorted, each as `parse` reads it. Warns of foreign ones."""
    found = []
    for key in sorted(storage.sizes(folder)):
        if (name := parse(key)) is not None:
            found.append((key, name))
        else:
            warn_of_foreign_object(storage, key)
    return found


def warn_of_foreign_object(storage: Storage, key: str) -> None:
    """Warn of an object or a folder that is not trialflow's. Skips files being written."""
    if not TEMPORARY_NAME.search(key):
        _logger.warning(
            "%s/%s is ignored: trialflow never uses such a name here; move the object elsewhere",
            storage.url, key,
        )  # fmt: skip


def user_at_host() -> str:
    """The user and the machine of this process: ``user@host``."""
    user = "unknown"
    with contextlib.suppress(OSError, KeyError):  # a container may have no name for its user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def parse_time(at: str) -> datetime | None:
    """Parse a time (ISO 8601, with an offset or Z); None if it is not such a time."""
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment


def age_of(at: str) -> timedelta | None:
    """The time since `at`; None if it is not a time: see `parse_time`."""
    moment = parse_time(at)
    return None if moment is None else datetime.now(timezone.utc) - moment


def is_older(at: str, age: timedelta) -> bool:
    """Return whether `at` is longer ago than `age`; False if `at` is not a time."""
    seen = age_of(at)
    return seen is not None and seen > age
