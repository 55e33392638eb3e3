"""What a trial's save has put into its staging folder, as the files of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.errors import CheckpointError
from trial_core.storage.storage_errors import Explainer
from trial_core.transfer.memory_files import is_memory_file

_logger = logging.getLogger(__name__)


def staged_files(staging: Path, rank: int) -> list[str]:
    """All files below a rank's staging folder, as sorted POSIX paths relative to it.

    Links that lead out of the folder (save to images in memory), nowhere or in a circle are left
    out with a warning; other links count as what they point to. Empty folders are not kept.

    Raises:
        CheckpointError: a file's name cannot be that of a checkpoint's file.
        StorageError: the folder cannot be read.
    """
    root = staging.resolve()
    with Explainer(str(staging)).explaining("read the files to upload in"):
        paths = sorted(path.relative_to(root).as_posix() for path in _files_in(root, (root,)))
    for path in paths:
        _check_name(path, rank)
    return paths


def _files_in(folder: Path, trail: tuple[Path, ...]) -> Iterator[Path]:
    """Those files below a folder, through links that stay below the root.

    Args:
        trail: where the folders from the root to this one really lie, the root first.
    """
    for path in sorted(folder.iterdir()):
        if is_memory_file(path):
            yield path
            continue
        if path.is_symlink() and not _may_follow(path, trail):
            continue
        if path.is_dir():
            yield from _files_in(path, (*trail, path.resolve()))
        elif path.is_file():
            yield path
        else:
            _logger.warning("not uploaded: %s is neither a file nor a folder", path)


def _may_follow(link: Path, trail: tuple[Path, ...]) -> bool:
    """Whether a link leads to something below the root, and not in a circle."""
    try:
        end = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        _logger.warning("not uploaded: %s is a link that leads nowhere (%s)", link, error)
        return False
    if not end.is_relative_to(trail[0]):
        _logger.warning("not uploaded: %s is a link that leads out, to %s", link, end)
        return False
    if end in trail:
        _logger.warning("not uploaded: %s is a link to a folder that it lies in", link)
        return False
    return True


def _check_name(path: str, rank: int) -> None:
    if path == layout.MANIFEST_NAME:
        raise CheckpointError(
            f"rank {rank} saved a file {path!r} at the top of its checkpoint: that name is kept "
            "for the checkpoint's own manifest; use another one, or a folder"
        )
    if not layout.is_file_path(path):
        raise CheckpointError(
            f"rank {rank} saved a file {path!r}: a checkpoint's file names are made of printable "
            "characters, without a backslash; use another name"
        )
