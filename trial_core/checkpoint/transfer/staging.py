"""The files that a trial's save has put into a rank's staging folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.errors import CheckpointError
from trial_core.processes.machine.memory_files import is_memory_file

_logger = logging.getLogger(__name__)


class StagedFile(msgspec.Struct, frozen=True):
    """A file to upload.

    Attributes:
        path: its path in the checkpoint.
        file: its local path.
        size_bytes: how many of its first bytes to upload.
    """

    path: str
    file: str
    size_bytes: int


def staged_files(staging: Path, rank: int) -> list[StagedFile]:
    """All files below a rank's staging folder, sorted by path.

    Links are followed only inside the folder, or to a memory file. Other links are skipped with a
    warning, as are links that are broken or form a circle. Empty folders are skipped.

    Raises:
        CheckpointError: a file's name is not allowed in a checkpoint.
        StorageError: the folder cannot be read.
    """
    root = staging.resolve()
    with ErrorTranslator(str(staging)).translated("read the files to upload in"):
        paths = sorted(path.relative_to(root).as_posix() for path in _files_in(root, (root,)))
        for path in paths:
            _check_name(path, rank)
        return [
            StagedFile(path, str(staging / path), (staging / path).stat().st_size) for path in paths
        ]


def _files_in(folder: Path, ancestors: tuple[Path, ...]) -> Iterator[Path]:
    """The files below a folder.

    Args:
        ancestors: the resolved folders from the root to this one, the root first.
    """
    for path in sorted(folder.iterdir()):
        if is_memory_file(path):
            yield path
            continue
        if path.is_symlink() and not _may_follow(path, ancestors):
            continue
        if path.is_dir():
            yield from _files_in(path, (*ancestors, path.resolve()))
        elif path.is_file():
            yield path
        else:
            _logger.warning("not uploaded: %s is neither a file nor a folder", path)


def _may_follow(link: Path, ancestors: tuple[Path, ...]) -> bool:
    """Return whether a link leads to a path below the root without a circle."""
    try:
        end = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle, before Python 3.13
        _logger.warning("not uploaded: %s is a link that cannot be followed (%s)", link, error)
        return False
    if not end.is_relative_to(ancestors[0]):
        _logger.warning("not uploaded: %s is a link to %s, outside the folder", link, end)
        return False
    if end in ancestors:
        _logger.warning("not uploaded: %s is a link to a folder that contains it", link)
        return False
    return True


def _check_name(path: str, rank: int) -> None:
    if path in (layout.MANIFEST_NAME, layout.CODE_NAME):
        raise CheckpointError(
            f"rank {rank} saved a file {path!r} at the top of its checkpoint: that name is "
            "reserved for the checkpoint's own manifest or code; use another name, or a folder"
        )
    if not layout.is_file_path(path):
        raise CheckpointError(
            f"rank {rank} saved a file {path!r}: a checkpoint's file names have only printable "
            "characters and no backslash; use another name"
        )
