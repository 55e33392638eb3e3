"""Moving a checkpoint's files between a local folder and the storage, every byte accounted for.

Each rank uploads what it has staged and fetches what it needs, by itself: no collective, a few
threads, bounded memory. A fetched file appears under its name only when it is what the manifest
promises.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid as uuids
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from trial_core.storage.chunks import READ_BYTES
from trial_core.storage.local import whole_file
from trial_core.storage.parallel import StopSignal, in_parallel
from trial_core.storage.storage_errors import Explainer
from trial_core.transfer.staging import staged_files
from trial_core.transfer.verified_read import READ_THREADS, Damage, StoredFile, read_files

_logger = logging.getLogger(__name__)

UPLOAD_THREADS = 4
"""Files that one rank reads and hashes at once, while parts of theirs are sent. How much memory
that takes altogether: see `window`."""

LOCAL_THREADS = 4
"""Local files that are hashed at once, to see whether they need not be fetched."""


@dataclass(frozen=True)
class Source:
    """A local file to upload.

    Attributes:
        path: what it is called in the checkpoint.
        file: where it is.
        size_bytes: how much of it counts, from its start.
    """

    path: str
    file: Path
    size_bytes: int


def upload_files(
    store: CheckpointStore,
    uuid: str,
    staging: Path,
    rank: int,
    *,
    threads: int = UPLOAD_THREADS,
) -> list[FileEntry]:
    """Upload all files below `staging`; return what a manifest must say of them, by path.

    Each rank calls it for its own folder. It may be called again after an error: files that are
    not committed are simply written again. Links that lead out of the folder, or nowhere, are
    left out with a warning; other links are uploaded as what they point to.

    Raises:
        CheckpointError: a file's name cannot be used, or a file changed meanwhile.
        StorageError: the storage failed, or `staging` cannot be read.
    """
    paths = staged_files(staging, rank)
    with Explainer(str(staging)).explaining("read the files to upload in"):
        sources = [Source(path, staging / path, (staging / path).stat().st_size) for path in paths]
    return upload_sources(store, uuid, sources, rank, threads=threads)


def upload_sources(
    store: CheckpointStore,
    uuid: str,
    sources: Iterable[Source],
    rank: int,
    *,
    stored: Mapping[str, FileEntry] | None = None,
    on_stored: Callable[[FileEntry], None] = lambda entry: None,
    threads: int = UPLOAD_THREADS,
) -> list[FileEntry]:
    """Upload files; return what a manifest must say of them, in their order.

    Args:
        stored: what an earlier try of this very upload has stored whole, by path. It is not sent
            again, if it is still there.
        on_stored: told of each file as soon as it is stored whole, one at a time, from threads.

    Raises:
        CheckpointError: a file changed meanwhile.
        StorageError: the storage failed, or a file cannot be read.
    """
    if not layout.is_uuid(uuid):
        raise CheckpointError(f"not a checkpoint's uuid: {uuid!r}")
    there = store.storage.sizes(layout.files_folder(uuid)) if stored else {}
    telling = Lock()

    def upload(source: Source, stop: StopSignal) -> FileEntry:
        stop.check()
        key = layout.file_key(uuid, source.path)
        entry = (stored or {}).get(source.path)
        if entry is None or not entry.size_bytes == source.size_bytes == there.get(key):
            size_bytes, digest = store.storage.upload(source.file, key, stop, source.size_bytes)
            entry = FileEntry(path=source.path, size_bytes=size_bytes, digest=digest, rank=rank)
            with telling:
                on_stored(entry)
        return entry

    return in_parallel(upload, sources, threads)


def merge_entries(per_rank: Mapping[int, Iterable[FileEntry]]) -> list[FileEntry]:
    """The files of all ranks, by path. Of equal files that several ranks wrote, one is kept.

    Raises:
        CheckpointError: several ranks wrote different files under one name.
    """
    merged: dict[str, FileEntry] = {}
    for rank in sorted(per_rank):
        for entry in per_rank[rank]:
            first = merged.setdefault(entry.path, entry)
            if (first.size_bytes, first.digest) != (entry.size_bytes, entry.digest):
                raise CheckpointError(
                    f"ranks {first.rank} and {entry.rank} both saved a file {entry.path!r}, with "
                    "different contents, and one would overwrite the other: let the trial's save "
                    "put the rank into the name, or write the file on one rank only "
                    "(if self.context.distributed.rank == 0: …)"
                )
    return [merged[path] for path in sorted(merged)]


def fetch_files(
    store: CheckpointStore,
    uuid: str,
    entries: Iterable[FileEntry],
    target: Path,
    *,
    local: Sequence[Path] = (),
    threads: int = READ_THREADS,
) -> int:
    """Bring files of a checkpoint into `target`, verified; return how many bytes were fetched.

    A file that is there already, with the right digest, is not fetched again. Each file is
    written under a temporary name and gets its own once its size and digest are right.

    Args:
        local: folders on this machine that may hold the same files under the same paths, such as
            those they were staged in. What is right there is linked or copied, not fetched.

    Raises:
        CheckpointDamaged: a file is missing or differs: which, whose, expected and seen.
        StorageError: the storage failed, or `target` cannot be written.
    """
    wanted = list(entries)
    for entry in wanted:
        if not layout.is_file_path(entry.path):
            raise CheckpointDamaged(
                f"checkpoint {uuid} lists {entry.path!r}, which would be written outside "
                f"{target}: it may be hostile, do not use it"
            )
    # One listing, so that a checkpoint with a hole is refused before anything is fetched.
    there = store.storage.sizes(layout.files_folder(uuid))
    for entry in wanted:
        seen_bytes = there.get(layout.file_key(uuid, entry.path))
        if seen_bytes != entry.size_bytes:
            raise _damaged(store, uuid, Damage(entry, seen_bytes))

    def refuse(damage: Damage) -> None:
        raise _damaged(store, uuid, damage)

    def is_here(entry: FileEntry, stop: StopSignal) -> bool:
        return _is_there(target / entry.path, entry, stop) or any(
            _take_over(folder / entry.path, target / entry.path, entry, stop) for folder in local
        )

    with Explainer(str(target)).explaining("write into"):
        here = in_parallel(is_here, wanted, LOCAL_THREADS)
        missing = [entry for entry, found in zip(wanted, here, strict=True) if not found]
        files = [_stored_file(uuid, entry, target / entry.path) for entry in missing]
        read_files(store.storage, files, refuse, threads)
        return sum(entry.size_bytes for entry in missing)


def find_damage(
    store: CheckpointStore,
    uuid: str,
    entries: Iterable[FileEntry],
    *,
    threads: int = READ_THREADS,
) -> list[Damage]:
    """Read every byte of a checkpoint's files; return what differs from what was promised."""
    wanted = list(entries)
    there = store.storage.sizes(layout.files_folder(uuid))
    found: dict[str, Damage] = {}

    def note(damage: Damage) -> None:
        found[damage.entry.path] = damage

    for entry in wanted:
        seen_bytes = there.get(layout.file_key(uuid, entry.path))
        if seen_bytes != entry.size_bytes:
            note(Damage(entry, seen_bytes))
    files = [_stored_file(uuid, entry) for entry in wanted if entry.path not in found]
    read_files(store.storage, files, note, threads)
    return [found[entry.path] for entry in wanted if entry.path in found]


def verify_files(store: CheckpointStore, uuid: str, entries: Iterable[FileEntry]) -> None:
    """Read every byte of a checkpoint's files and compare.

    Raises:
        CheckpointDamaged: some differ; names them all.
    """
    damage = find_damage(store, uuid, entries)
    if damage:
        raise _damaged(store, uuid, *damage)


def refuse_if_deleted(store: CheckpointStore, uuid: str) -> None:
    """Call it of damage, unless the checkpoint is claimed: a prune takes the manifest away first.

    Raises:
        CheckpointNotFound: it has been deleted since its manifest was read.
    """
    try:
        store.open(uuid)
    except CheckpointNotFound:
        raise CheckpointNotFound(
            f"checkpoint {uuid} has been deleted meanwhile, from {store.url}: use another one, and "
            "pin it if it shall stay"
        ) from None
    except CheckpointDamaged:
        return  # its manifest cannot be read; but it is there


def download(store: CheckpointStore, uuid: str, target: Path) -> Manifest:
    """Bring a whole checkpoint into a folder, verified, and its manifest last.

    Args:
        uuid: of the checkpoint, or an unambiguous beginning.
        target: a new or empty folder, or one that holds this checkpoint or a part of it.

    Raises:
        CheckpointError: `target` holds something else.
        CheckpointNotFound: no checkpoint is called so; or it has been deleted meanwhile.
        CheckpointDamaged: a file is missing or differs.
    """
    manifest = store.open(uuid)
    final = target / layout.MANIFEST_NAME
    begun = target / f".{layout.MANIFEST_NAME}.part"
    data = manifest.to_json()
    with Explainer(str(target)).explaining("write into"):
        target.mkdir(parents=True, exist_ok=True)
        mine = any(path.is_file() and path.read_bytes() == data for path in (final, begun))
        if not mine and any(target.iterdir()):
            raise CheckpointError(
                f"{target} is not empty, and does not hold checkpoint {manifest.uuid}: choose a "
                "new folder, or empty it"
            )
        if not final.exists():
            begun.write_bytes(data)
    try:
        fetch_files(store, manifest.uuid, manifest.files, target)
    except CheckpointDamaged:
        refuse_if_deleted(store, manifest.uuid)
        raise
    with Explainer(str(target)).explaining("write into"):
        with whole_file(final, is_durable=False) as file:
            file.write(data)
        begun.unlink(missing_ok=True)
    return manifest


def _is_there(path: Path, entry: FileEntry, stop: StopSignal) -> bool:
    """Whether a local file is what the entry promises."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            stop.check()
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}" == entry.digest


def _take_over(source: Path, path: Path, entry: FileEntry, stop: StopSignal) -> bool:
    """Make `path` what the entry promises from a file elsewhere on this machine, if that is so."""
    temporary = path.with_name(f".{uuids.uuid4().hex}.part")
    try:
        if not source.is_file() or source.stat().st_size != entry.size_bytes:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), temporary)
        except OSError:  # another disk, or a file in memory
            shutil.copyfile(source, temporary)
        if not _is_there(temporary, entry, stop):
            return False
        os.replace(temporary, path)
    except OSError as error:
        _logger.warning("fetched, though it may be in %s: [%s]", source, error)
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _stored_file(uuid: str, entry: FileEntry, target: Path | None = None) -> StoredFile:
    return StoredFile(entry, layout.file_key(uuid, entry.path), target)


def _damaged(store: CheckpointStore, uuid: str, *damage: Damage) -> CheckpointDamaged:
    what = "; ".join(str(each) for each in damage)
    return CheckpointDamaged(
        f"checkpoint {uuid} is damaged: {what}; in {store.files_url(uuid)}. Its stored files have "
        "changed since it was committed: use another checkpoint"
    )
