"""Words that all storages share, of files that are moved and objects that are deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trial_core.errors import CheckpointError

READ_BYTES = 4 * 2**20
"""How much of a local file is in memory at once, a thread."""

DELETED_IN_VAIN = (
    "the storage may keep what was deleted for a time, or not allow it: look for a retention rule "
    "or a legal hold, then delete again"
)


class RangeRead(NamedTuple):
    """What a ranged read has brought.

    Attributes:
        size_bytes: how much; less than was asked for where the object ends.
        version: what tells this state of the object from others, where the storage says so.
    """

    size_bytes: int
    version: str | None


class DeletedFiles(NamedTuple):
    """What was deleted.

    Attributes:
        files: how many objects.
        size_bytes: their size together.
        uploads: how many uploads that somebody had begun and never ended.
    """

    files: int
    size_bytes: int
    uploads: int


def chunks(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """What an open file holds, a little at a time, up to that size."""
    left = size_bytes
    while chunk := file.read(min(READ_BYTES, left)):
        left -= len(chunk)
        yield chunk


def changed(source: Path) -> CheckpointError:
    """What to raise of a file that somebody wrote to while it was uploaded."""
    return CheckpointError(
        f"{source} changed while it was uploaded: a trial's save must have finished writing when "
        "it returns"
    )
