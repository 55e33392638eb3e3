"""A staged checkpoint, and the files that a trial's save has put into a rank's staging folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.errors import CheckpointError
from trial_core.processes.machine.memory_files import is_memory_file
from trial_core.schedule.sequencer import Progress

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has staged, and that is not committed yet.

    Attributes:
        saved_at: when it was staged; a retry of the upload must give the same manifest.
        progress: the run's progress, this checkpoint included.
        metrics: the last metrics of each kind.
        folders: each rank's staging folder, if the driver uploads the files.
    """

    uuid: str
    saved_at: str
    progress: Progress
    metrics: dict[str, dict[str, Any]]
    folders: tuple[str, ...] = ()

    @classmethod
    def now(
        cls,
        uuid: str,
        progress: Progress,
        metrics: Mapping[str, Mapping[str, Any]],
        folders: tuple[str, ...] = (),
    ) -> StagedCheckpoint:
        """A checkpoint that was staged just now, at `progress`."""
        kept = {kind: dict(values) for kind, values in metrics.items()}
        return cls(uuid, utc_now(), progress.after_checkpoint(), kept, folders)


class StagedFile(msgspec.Struct, frozen=True):
    """A local file to upload: so many of its first bytes, as `path` of the checkpoint."""

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
    """The files below a folder. `ancestors`: the resolved folders from the root to this one."""
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
