"""Uploads a staged checkpoint. Each rank uploads its own files, without a collective."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry, utc_now
from trial_core.checkpoint.storage.local_files import local_digest
from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, CheckpointRefused
from trial_core.processes.machine.memory_files import is_memory_file
from trial_core.schedule.sequencer import Progress

_logger = logging.getLogger(__name__)

UPLOAD_THREADS = 4
"""Files that one rank reads and hashes at once. The storage's buffer pool bounds their memory."""


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has staged, and that is not committed yet.

    Attributes:
        saved_at: when it was staged; a retry of the upload must give the same manifest.
        progress, metrics: the run's, this checkpoint included; the last metrics of each kind.
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
    """All files below a rank's staging folder, sorted by path. Raises CheckpointError if a name is
    not allowed in a checkpoint, StorageError if the folder cannot be read.

    Links are followed only inside the folder, or to a memory file. Other links are skipped with a
    warning, as are links that are broken or form a circle. Empty folders are skipped.
    """
    root = staging.resolve()
    with ErrorTranslator(str(staging)).translated("read the files to upload in"):
        paths = sorted(path.relative_to(root).as_posix() for path in _files_in(root, (root,)))
        for path in paths:
            _check_name(path, rank)
        return [
            StagedFile(path, str(staging / path), (staging / path).stat().st_size) for path in paths
        ]


def upload_files(
    store: CheckpointStore, uuid: str, staging: Path, rank: int, shared: Iterable[FileEntry] = ()
) -> list[FileEntry]:
    """Upload all files of a rank's staging folder: see `staged_files` and `upload_staged`. May be
    called again after an error: files that are not committed are overwritten."""
    return upload_staged(store, uuid, staged_files(staging, rank), rank, shared=shared)


def upload_staged(
    store: CheckpointStore,
    uuid: str,
    files: Iterable[StagedFile],
    rank: int,
    *,
    shared: Iterable[FileEntry] = (),
    changing: set[StoredPath] | None = None,
    stored: Mapping[StoredPath, FileEntry] | None = None,
    on_stored: Callable[[FileEntry], None] = lambda entry: None,
) -> list[FileEntry]:
    """Upload files; return their manifest entries, in the same order.

    Args:
        shared: stored files of an earlier checkpoint, with the places where they are. A file with
            the bytes of one that has two copies is not uploaded, and its entry refers to them. If
            there is one copy, the file is uploaded as the second. The smallest is always uploaded:
            a checkpoint must have a file of its own (see `checkpoint.commit`).
        changing: paths of files that have changed since an earlier checkpoint. They are presumed to
            change again, and not hashed first. Gets the paths that are found now.
        stored: entries that an earlier attempt at this upload has stored, by path. They are
            skipped if they still exist with that size.
        on_stored: called after each stored file, from several threads but one at a time.

    Raises:
        CheckpointError: a file changed meanwhile.
        StorageError: the storage failed, or a file cannot be read.
    """
    folder = layout.files_folder(uuid)  # refuses a wrong uuid, also if nothing is stored
    sizes = store.storage.sizes(folder) if stored else {}
    files = list(files)
    own = min(files, key=lambda file: file.size_bytes, default=None)
    shared = list(shared)
    by_copies = sorted(shared, key=lambda entry: (bool(entry.stored_at), bool(entry.copy_at)))
    known = {(entry.size_bytes, entry.digest): entry for entry in by_copies}
    shared_sizes = {size_bytes for (size_bytes, _), entry in known.items() if entry.stored_at}
    earlier = {entry.path: entry.digest for entry in shared}
    changing = set() if changing is None else changing
    lock = Lock()

    def with_copy(file: StagedFile, entry: FileEntry) -> FileEntry:
        there = known.get((entry.size_bytes, entry.digest))
        is_second = there is not None and not there.stored_at and file is not own
        return msgspec.structs.replace(entry, copy_at=there.copy_at if there and is_second else "")

    def upload(file: StagedFile, stop: CancelSignal) -> FileEntry:
        stop.check()
        key, path = layout.file_key(uuid, file.path), StoredPath(file.path)
        entry = (stored or {}).get(path)
        if entry is not None and entry.size_bytes == file.size_bytes == sizes.get(key):
            return with_copy(file, entry)
        may_be_shared = file.size_bytes in shared_sizes and path not in changing
        if file is not own and may_be_shared:
            # Hashed before it may be sent: a file that has changed is hashed twice, once.
            with ErrorTranslator(file.file).translated("read"):
                digest = local_digest(Path(file.file), file.size_bytes, stop)
            there = known.get((file.size_bytes, digest))
            if there is not None and there.stored_at:
                return FileEntry(
                    path=path, size_bytes=file.size_bytes, digest=digest, rank=rank,
                    stored_at=there.stored_at, copy_at=there.copy_at,
                )  # fmt: skip
            if path in earlier:
                changing.add(path)
        size_bytes, digest = store.storage.upload(Path(file.file), key, stop, file.size_bytes)
        entry = FileEntry(path=path, size_bytes=size_bytes, digest=digest, rank=rank)
        if earlier.get(path) == digest:
            changing.discard(path)
        with lock:
            on_stored(entry)
        return with_copy(file, entry)

    return in_parallel(upload, files, UPLOAD_THREADS)


def merge_entries(per_rank: Mapping[int, Iterable[FileEntry]]) -> list[FileEntry]:
    """The files of all ranks, sorted by path. Of equal files, the lowest rank's entry is kept.
    Raises CheckpointRefused if several ranks wrote different files under one name."""
    merged: dict[StoredPath, FileEntry] = {}
    for rank in sorted(per_rank):
        for entry in per_rank[rank]:
            first = merged.setdefault(entry.path, entry)
            if (first.size_bytes, first.digest) != (entry.size_bytes, entry.digest):
                raise CheckpointRefused(
                    f"ranks {first.rank} and {entry.rank} both saved a file {entry.path!r} with "
                    "different contents, and one would overwrite the other: put the rank into the "
                    "file's name in the trial's save, or write the file on one rank only "
                    "(if self.context.distributed.rank == 0: …)"
                )
    return [merged[path] for path in sorted(merged)]


def prefix_rank(rank: int, message: str) -> str:
    """A rank's error message that names the rank once."""
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}"


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
