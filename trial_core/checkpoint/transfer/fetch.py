"""Fetches and verifies files of a checkpoint. Each rank fetches its own, without a collective.

A fetched file appears under its name only after its size and digest match the manifest.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.storage.local_files import local_digest, replace_file, temporary_beside
from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.verified_read import (
    OnRead,
    StoredFile,
    damage_error,
    read_files,
    refuse_damaged,
    unheard,
    wrong_sizes,
)
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.processes.machine.memory_files import is_memory_file

_logger = logging.getLogger(__name__)

LOCAL_THREADS = 4
"""Local files that are hashed at once to decide what to fetch."""


def fetch_files(
    store: CheckpointStore,
    uuid: str,
    entries: Iterable[FileEntry],
    target: Path,
    *,
    on_read: OnRead = unheard,
) -> int:
    """Bring files of a checkpoint into `target`, verified; return the bytes fetched. A file that is
    there already with the right digest is not fetched.

    Raises:
        CheckpointDamaged: a file is missing or differs, or would be written outside `target`.
        StorageError: the storage failed, or `target` cannot be written.
    """
    wanted = list(entries)
    # Before any fetch: one listing finds missing files.
    if damage := wrong_sizes(store.storage, uuid, wanted):
        raise damage_error(store.storage, uuid, damage)
    missing = take_local(uuid, wanted, target)
    files = [StoredFile(entry, entry.key(uuid), target / entry.checked_path) for entry in missing]
    with ErrorTranslator(str(target)).translated("write into"):
        read_files(store.storage, files, partial(refuse_damaged, store.storage, uuid), on_read)
    return sum(entry.size_bytes for entry in missing)


def take_local(
    uuid: str, entries: Iterable[FileEntry], target: Path, local: Sequence[Path] = ()
) -> list[FileEntry]:
    """Bring files of a checkpoint into `target` that are on this machine; return the other ones.

    `local`: folders that may hold the same files under the same paths, for example from an earlier
    launch. Files with the right digest are linked or copied.

    Raises:
        CheckpointDamaged: a file would be written outside `target`; none was brought.
        StorageError: `target` cannot be written.
    """
    wanted = list(entries)
    for entry in wanted:
        _ = entry.checked_path  # before any file is written

    def is_here(entry: FileEntry, stop: CancelSignal) -> bool:
        return _matches(target / entry.checked_path, entry, stop) or any(
            _take_local(folder / entry.checked_path, target / entry.checked_path, entry, stop)
            for folder in local
        )

    with ErrorTranslator(str(target)).translated("write into"):
        here = in_parallel(is_here, wanted, LOCAL_THREADS)
    return [entry for entry, found in zip(wanted, here, strict=True) if not found]


def download(
    store: CheckpointStore, uuid: str, target: Path, on_read: OnRead = unheard
) -> Manifest:
    """Bring a whole checkpoint, its code included, into a folder, verified; its manifest last.

    Args:
        uuid: the checkpoint's uuid, or an unambiguous prefix of it.
        target: a new or empty folder, or one that holds this checkpoint or a part of it;
            CheckpointError if it holds other files.

    Raises:
        CheckpointNotFound: no checkpoint matches, or it has been deleted meanwhile.
        CheckpointDamaged: a file is missing or differs.
    """
    manifest = store.open(uuid)
    final = target / layout.MANIFEST_NAME
    unfinished = target / f".{layout.MANIFEST_NAME}.part"
    data = manifest.to_json()
    errors = ErrorTranslator(str(target))
    with errors.translated("write into"):
        target.mkdir(parents=True, exist_ok=True)
        is_same = any(path.is_file() and path.read_bytes() == data for path in (final, unfinished))
        if not is_same and any(target.iterdir()):
            raise CheckpointError(
                f"{target} is not empty, and does not hold checkpoint {manifest.uuid}: choose a "
                "new folder, or empty it"
            )
        if not final.exists():
            unfinished.write_bytes(data)
    try:
        fetch_files(store, manifest.uuid, manifest.all_files, target, on_read=on_read)
    except CheckpointDamaged:
        store.raise_if_deleted(manifest.uuid)
        raise
    with errors.translated("write into"):
        replace_file(final, data)
        unfinished.unlink(missing_ok=True)
    return manifest


def check_downloaded(folder: Path, uuid: str, entries: Iterable[FileEntry]) -> None:
    """Compare files of a downloaded checkpoint with its manifest. Raises CheckpointDamaged, which
    names all that are missing or differ, or StorageError if one cannot be read."""
    wanted = list(entries)
    with ErrorTranslator(str(folder)).translated("read"):
        intact = in_parallel(
            lambda entry, stop: _matches(folder / entry.checked_path, entry, stop),
            wanted,
            LOCAL_THREADS,
        )
    if wrong := [
        each.checked_path for each, is_intact in zip(wanted, intact, strict=True) if not is_intact
    ]:
        raise CheckpointDamaged(
            f"checkpoint {uuid} in {folder} is damaged: {', '.join(wrong)} is missing or differs "
            "from the manifest; download the checkpoint again"
        )


def _matches(path: Path, entry: FileEntry, stop: CancelSignal) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    is_same = local_digest(path, entry.size_bytes, stop) == entry.digest
    return is_same and path.stat().st_size == entry.size_bytes


def _take_local(source: Path, path: Path, entry: FileEntry, stop: CancelSignal) -> bool:
    """Link or copy `source` to `path` if it matches the entry; return whether it did."""
    temporary = temporary_beside(path)
    try:
        if not source.is_file() or source.stat().st_size != entry.size_bytes:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_memory_file(source):
            temporary.symlink_to(os.readlink(source))
        else:
            try:
                os.link(source.resolve(), temporary)
            except OSError:  # another disk
                shutil.copyfile(source, temporary)
        if not _matches(temporary, entry, stop):
            return False
        os.replace(temporary, path)
    except OSError as error:
        _logger.warning("%s cannot be used, so it is fetched from the storage: [%s]", source, error)
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True
