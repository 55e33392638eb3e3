"""Moving a checkpoint's files between a local folder and the storage, every byte accounted for.

Each rank uploads what it has staged and fetches what it needs, by itself: no collective, a few
threads, bounded memory. A fetched file appears under its name only when it is what the manifest
promises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.failures import Explainer
from trial_core.checkpoint.local_storage import whole_file
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.parallel import StopSignal, in_parallel
from trial_core.checkpoint.staging import staged_files
from trial_core.checkpoint.storage import READ_BYTES
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError

UPLOAD_THREADS = 2
"""Files uploaded at once by one rank. On S3 each has up to 4 parts of 16 MiB in
memory, and the client as much again."""

FETCH_THREADS = 4
"""Files fetched at once by one rank. Each has up to 16 MiB in memory, and the client
as much again."""

FETCH_BYTES = 16 * 2**20
"""Size of a ranged read."""


@dataclass(frozen=True)
class Damage:
    """How a stored file differs from what its manifest promises.

    Attributes:
        entry: what was promised.
        seen_bytes: its size in the storage, None when it is missing.
        seen_digest: its digest in the storage; None when the size alone tells.
    """

    entry: FileEntry
    seen_bytes: int | None
    seen_digest: str | None = None

    def __str__(self) -> str:
        promised = self.entry
        file = f"{promised.path}, written by rank {promised.rank},"
        if self.seen_bytes is None:
            return f"{file} is missing (expected {promised.size_bytes} bytes, {promised.digest})"
        if self.seen_digest is None:
            return f"{file} has {self.seen_bytes} bytes, expected {promised.size_bytes}"
        return f"{file} has digest {self.seen_digest}, expected {promised.digest}"


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
    if not layout.is_uuid(uuid):
        raise CheckpointError(f"not a checkpoint's uuid: {uuid!r}")
    paths = staged_files(staging, rank)

    def upload(path: str, stop: StopSignal) -> FileEntry:
        stop.check()
        key = layout.file_key(uuid, path)
        size_bytes, digest = store.storage.upload(staging / path, key, stop)
        return FileEntry(path=path, size_bytes=size_bytes, digest=digest, rank=rank)

    return in_parallel(upload, paths, threads)


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
    threads: int = FETCH_THREADS,
) -> int:
    """Bring files of a checkpoint into `target`, verified; return how many bytes were fetched.

    A file that is there already, with the right digest, is not fetched again. Each file is
    written under a temporary name and gets its own once its size and digest are right.

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

    def fetch(entry: FileEntry, stop: StopSignal) -> int:
        path = target / entry.path
        if _is_there(path, entry, stop):
            return 0
        digest, seen_bytes = hashlib.sha256(), 0
        with whole_file(path, is_durable=False) as file:
            for chunk in _chunks(store, uuid, entry, stop):
                digest.update(chunk)
                file.write(chunk)
                seen_bytes += len(chunk)
            damage = _compare(entry, seen_bytes, digest.hexdigest())
            if damage is not None:
                raise _damaged(store, uuid, damage)
        return seen_bytes

    with Explainer(str(target)).explaining("write into"):
        return sum(in_parallel(fetch, wanted, threads))


def find_damage(
    store: CheckpointStore,
    uuid: str,
    entries: Iterable[FileEntry],
    *,
    threads: int = FETCH_THREADS,
) -> list[Damage]:
    """Read every byte of a checkpoint's files; return what differs from what was promised."""
    there = store.storage.sizes(layout.files_folder(uuid))

    def look(entry: FileEntry, stop: StopSignal) -> Damage | None:
        seen_bytes = there.get(layout.file_key(uuid, entry.path))
        if seen_bytes != entry.size_bytes:
            return Damage(entry, seen_bytes)
        digest, seen_bytes = hashlib.sha256(), 0
        for chunk in _chunks(store, uuid, entry, stop):
            digest.update(chunk)
            seen_bytes += len(chunk)
        return _compare(entry, seen_bytes, digest.hexdigest())

    return [damage for damage in in_parallel(look, entries, threads) if damage is not None]


def verify_files(store: CheckpointStore, uuid: str, entries: Iterable[FileEntry]) -> None:
    """Read every byte of a checkpoint's files and compare.

    Raises:
        CheckpointDamaged: some differ; names them all.
    """
    damage = find_damage(store, uuid, entries)
    if damage:
        raise _damaged(store, uuid, *damage)


def download(store: CheckpointStore, uuid: str, target: Path) -> Manifest:
    """Bring a whole checkpoint into a folder, verified, and its manifest last.

    Args:
        uuid: of the checkpoint, or an unambiguous beginning.
        target: a new or empty folder, or one that holds this checkpoint or a part of it.

    Raises:
        CheckpointError: `target` holds something else.
        CheckpointNotFound: no checkpoint is called so.
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
    fetch_files(store, manifest.uuid, manifest.files, target)
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


def _chunks(
    store: CheckpointStore, uuid: str, entry: FileEntry, stop: StopSignal
) -> Iterator[bytes]:
    """The stored bytes, up to the size promised."""
    key = layout.file_key(uuid, entry.path)
    for start in range(0, entry.size_bytes, FETCH_BYTES):
        stop.check()
        yield store.storage.read_range(key, start, min(start + FETCH_BYTES, entry.size_bytes))


def _compare(entry: FileEntry, seen_bytes: int, seen_hex: str) -> Damage | None:
    seen_digest = f"sha256:{seen_hex}"
    if (seen_bytes, seen_digest) == (entry.size_bytes, entry.digest):
        return None
    return Damage(entry, seen_bytes, seen_digest)


def _damaged(store: CheckpointStore, uuid: str, *damage: Damage) -> CheckpointDamaged:
    what = "; ".join(str(each) for each in damage)
    return CheckpointDamaged(
        f"checkpoint {uuid} is damaged: {what}; in {store.files_url(uuid)}. Its stored files have "
        "changed since it was committed: use another checkpoint"
    )
