"""Uploads a checkpoint's files. Each rank uploads its own files, without a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError
from trial_core.storage.parallel import CancelSignal, in_parallel
from trial_core.transfer.staging import StagedFile, staged_files

UPLOAD_THREADS = 4
"""Files that one rank reads and hashes at once. The storage's buffer pool bounds their memory."""


def upload_files(store: CheckpointStore, uuid: str, staging: Path, rank: int) -> list[FileEntry]:
    """Upload all files of a rank's staging folder (see `staged_files`); return their entries.

    May be called again after an error: files that are not committed are overwritten.

    Raises:
        CheckpointError: a file's name is not allowed, or a file changed meanwhile.
        StorageError: the storage failed, or `staging` cannot be read.
    """
    return upload_staged(store, uuid, staged_files(staging, rank), rank)


def upload_staged(
    store: CheckpointStore,
    uuid: str,
    files: Iterable[StagedFile],
    rank: int,
    *,
    stored: Mapping[str, FileEntry] | None = None,
    on_stored: Callable[[FileEntry], None] = lambda entry: None,
    threads: int = UPLOAD_THREADS,
) -> list[FileEntry]:
    """Upload files; return their manifest entries, in the same order.

    Args:
        stored: entries that an earlier attempt at this upload has stored, by path. They are
            skipped if they still exist with that size.
        on_stored: called after each stored file, from several threads but one at a time.

    Raises:
        CheckpointError: a file changed meanwhile.
        StorageError: the storage failed, or a file cannot be read.
    """
    folder = layout.files_folder(uuid)  # refuses what is no uuid, also if nothing is stored
    sizes = store.storage.sizes(folder) if stored else {}
    lock = Lock()

    def upload(file: StagedFile, stop: CancelSignal) -> FileEntry:
        stop.check()
        key = layout.file_key(uuid, file.path)
        entry = (stored or {}).get(file.path)
        if entry is None or not entry.size_bytes == file.size_bytes == sizes.get(key):
            size_bytes, digest = store.storage.upload(Path(file.file), key, stop, file.size_bytes)
            entry = FileEntry(path=file.path, size_bytes=size_bytes, digest=digest, rank=rank)
            with lock:
                on_stored(entry)
        return entry

    return in_parallel(upload, files, threads)


def merge_entries(per_rank: Mapping[int, Iterable[FileEntry]]) -> list[FileEntry]:
    """The files of all ranks, sorted by path. Of equal files, the lowest rank's entry is kept.

    Raises:
        CheckpointError: several ranks wrote different files under one name.
    """
    merged: dict[str, FileEntry] = {}
    for rank in sorted(per_rank):
        for entry in per_rank[rank]:
            first = merged.setdefault(entry.path, entry)
            if (first.size_bytes, first.digest) != (entry.size_bytes, entry.digest):
                raise CheckpointError(
                    f"ranks {first.rank} and {entry.rank} both saved a file {entry.path!r} with "
                    "different contents, and one would overwrite the other: put the rank into the "
                    "file's name in the trial's save, or write the file on one rank only "
                    "(if self.context.distributed.rank == 0: …)"
                )
    return [merged[path] for path in sorted(merged)]


def prefix_rank(rank: int, message: str) -> str:
    """A rank's error message that names the rank once."""
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}"
