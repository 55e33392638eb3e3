"""The storage interface: the operations on stored objects that checkpoints need.

It works on every protocol of fsspec: ``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://``
and others. Keys are POSIX paths relative to the storage's URL. Every failure is a `StorageError`.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fsspec.asyn import AsyncFileSystem

from trial_core.checkpoint.storage.buffer_pool import BufferPool
from trial_core.checkpoint.storage.local_files import changed_during_upload, sha256_of
from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.checkpoint.storage.storage_errors import (
    ABSENCE_CODES,
    ErrorTranslator,
    is_refusal,
    service_code,
    statuses,
    storage_exceptions,
)
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError

PROBES = "probes"
"""The folder of objects that are written and deleted to test a storage."""

PROBE_LIFETIME = timedelta(days=7)
"""The age of a probe that a killed check must have left, so that the next check deletes it."""

MAX_OBJECT_BYTES = 32 * 2**20
"""The size of the largest object that is read whole: a manifest, a record, a report."""

NOT_DELETED_ADVICE = (
    "the storage may delay or forbid deletion: look for a retention rule or a legal hold, then "
    "delete again"
)

# Other decisions by the clocks of several machines allow this; the shortest waits three minutes.
MAX_CLOCK_DIFFERENCE_SECONDS = 60.0

# AWS may refuse both of two conditional writes that arrive at once, and ask to try again.
_TRY_AGAIN_CODES = ("ConditionalRequestConflict", "OperationAborted")
_CREATE_ATTEMPTS = 5
_DELETE_THREADS = 8
_SHOWN_KEYS = 3
_RANGE_NOT_SATISFIABLE = 416

_CONDITIONAL_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols whose fsspec file systems send the condition with the write. The others look first and
write then, which a probe without a second writer cannot detect."""

_CREATE_ONLY_ADVICE = (
    "use Amazon S3, an S3 server with conditional writes (perhaps a newer version of this one), "
    "gs://, az://, or a folder on a disk with hard links"
)


class StorageSpec(msgspec.Struct, frozen=True):
    """Where a storage is, as plain data that the driver sends to the ranks. Its `options` may hold
    credentials, so `repr` hides them."""

    url: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        shown = ErrorTranslator(self.url, self.options).url
        return f"StorageSpec(url={shown!r}, options=<{len(self.options)} not shown>)"


class RangeRead(NamedTuple):
    """The result of a ranged read: the bytes read, fewer than requested where the object ends; and
    the state of the object that was read, None if the storage does not tell states apart."""

    size_bytes: int
    version: str | None


class StoredObject(NamedTuple):
    """An object's details in a listing. Its time is by the storage's clock, if it tells one."""

    size_bytes: int
    modified_at: datetime | None


class DeletedFiles(NamedTuple):
    """The result of `Storage.clear`: deleted objects, their total size, unfinished uploads."""

    files: int
    size_bytes: int
    uploads: int


class Storage:
    """Objects below a URL, which is `url` without credentials. Safe to use from several threads.

    Attributes:
        buffers: bounds the memory of all transfers of this storage together.
        is_process_local: True if only this process can see the stored objects.
    """

    is_process_local = False

    def __init__(self, spec: StorageSpec, fs: Any, root: str) -> None:
        self.spec = spec
        self._fs = fs
        self._root = root.rstrip("/")
        self._errors = ErrorTranslator(spec.url, spec.options)
        self.url = self._errors.url.rstrip("/")
        self.buffers = BufferPool()
        self._is_create_only = False

    def read(self, key: str) -> bytes | None:
        """All bytes of a small object; None if it does not exist. A 404 that is not the storage's
        own is a StorageError. Raises CheckpointDamaged if it has more than `MAX_OBJECT_BYTES`."""
        with self._errors.translated(f"read {key} in"):
            data = self._read(self._path(key))
        if data is not None and len(data) > MAX_OBJECT_BYTES:
            raise CheckpointDamaged(
                f"{self.url}/{key} has more than {MAX_OBJECT_BYTES:,} bytes and is not read: "
                "trialflow writes no such object there; restore it from a backup, or delete it"
            )
        return data

    def exists(self, key: str) -> bool:
        """Return whether an object of any size has this key. Reads it, so it should be small."""
        with self._errors.translated(f"read {key} in"):
            return self._read(self._path(key)) is not None

    def create(self, key: str, data: bytes) -> None:
        """Create a small object. If several writers create the same key, one succeeds. Raises
        FileExistsError if it exists with other bytes; StorageError also if the storage cannot
        promise this: see `check_create_only`.

        Succeeds if the object exists with the same bytes: the reply to an earlier attempt may have
        been lost. After an error it may have been stored: create it again to find out.
        """
        self.check_create_only()
        path = self._path(key)
        with self._errors.translated(f"write {key} in"):
            existing = self._create_or_read(path, data)
        if existing is not None and existing != data:
            raise FileExistsError(f"{key} exists in {self.url}")

    def write(self, key: str, data: bytes) -> None:
        """Store a small object; overwrites an existing one."""
        with self._errors.translated(f"write {key} in"):
            self._put_small(self._path(key), data)

    def read_into(
        self, key: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        """Fill `view` with the object's bytes from `start` on. `version` is of an earlier read: a
        storage that keeps versions reads that one; others read the current state, so compare the
        result's version."""
        with self._errors.translated(f"read {key} in"):
            data = self._fs.cat_file(self._path(key), start=start, end=start + len(view))
        view[: len(data)] = data
        return RangeRead(len(data), None)

    def upload(
        self, source: Path, key: str, stop: CancelSignal, size_bytes: int | None = None
    ) -> tuple[int, str]:
        """Upload a file, or its first `size_bytes`; return their number and ``sha256:…`` digest.
        Overwrites. Raises CheckpointError if the file changed meanwhile, or is shorter.

        A failed upload leaves neither a partial object nor an unfinished upload.
        """
        with self._errors.translated(f"upload {source} to {key} in"):
            before = os.stat(source)
            wanted = before.st_size if size_bytes is None else size_bytes
            if before.st_size < wanted:
                raise changed_during_upload(source)
            digest = self._store_file(source, wanted, key, stop)
            after = os.stat(source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise changed_during_upload(source)
        return wanted, f"sha256:{digest}"

    def sizes(self, folder: str) -> dict[str, int]:
        """Keys and sizes of all objects below a folder; empty if it does not exist."""
        return {key: each.size_bytes for key, each in self.objects(folder).items()}

    def objects(self, folder: str) -> dict[str, StoredObject]:
        """As `sizes`, with each object's time of writing."""
        with self._errors.translated(f"list {folder} in"):
            self._fs.invalidate_cache()  # other processes write as well
            found = self._find(self._path(folder))
        prefix = self._root.lstrip("/")
        keys = {name.lstrip("/")[len(prefix) :].lstrip("/"): name for name in found}
        return {
            key: StoredObject(int(found[name]["size"]), _modified_at(found[name]))
            for key, name in keys.items()
            if key.startswith(f"{folder}/") and _is_plain(key)  # no request can be for another
        }

    def is_linked(self, key: str) -> bool:
        """Return whether an object's place is a link, or in a folder that is one."""
        return False

    def now(self) -> datetime | None:
        """The time by the storage's clock; None if it does not tell. Writes a probe object. Ages in
        a storage are compared by its own clock: the clocks of two machines may differ."""
        key = f"{PROBES}/{uuid.uuid4()}"
        self.write(key, key.encode())
        try:
            probe = self.objects(PROBES).get(key)
        finally:
            self.remove(key)
        return probe.modified_at if probe is not None else None

    def delete(self, key: str) -> None:
        """Delete an object, which must exist."""
        with self._errors.translated(f"delete {key} in"):
            self._fs.rm_file(self._path(key))

    def remove(self, key: str) -> None:
        """Delete an object if it exists; another process may delete it at the same time."""
        try:
            self.delete(key)
        except StorageError as error:
            # Not asked again if the storage has said so: another process may have created it since.
            if not self._was_absent(key, error) and self.exists(key):
                raise

    def _was_absent(self, key: str, error: StorageError) -> bool:
        cause = error.__cause__
        with self._errors.translated(f"delete {key} in"):
            return isinstance(cause, FileNotFoundError) and self._is_absence(self._path(key), cause)

    def clear(self, folder: str, keep: Collection[str] = ()) -> DeletedFiles:
        """Delete all objects and unfinished uploads below a folder, but not the objects with the
        keys `keep`. Raises StorageError if objects still exist; it names some of them."""
        uploads = self.abort_uploads(folder)
        before = {key: size for key, size in self.sizes(folder).items() if key not in keep}
        in_parallel(lambda key, _: self.remove(key), before, _DELETE_THREADS)
        if before and (left := sorted(self.sizes(folder).keys() - set(keep))):
            raise StorageError(
                f"{len(left)} of {len(before)} objects in {self.url}/{folder} are still there "
                f"after they were deleted ({', '.join(left[:_SHOWN_KEYS])}): {NOT_DELETED_ADVICE}"
            )
        return DeletedFiles(len(before), sum(before.values()), uploads)

    def unfinished_uploads(self, folder: str) -> list[tuple[str, StoredObject]]:
        """The unfinished uploads below a folder that `objects` does not list, by their keys. Their
        size counts as 0, and their time is when they began."""
        return []

    def abort_uploads(self, folder: str, before: datetime | None = None) -> int:
        """Abort all unfinished uploads below a folder; return their number. An upload that is still
        running there fails. `before`: only those that began earlier, by the storage's clock."""
        return 0

    def check_create_only(self) -> None:
        """Check that exactly one of several concurrent `create` calls for a key succeeds. Raises
        StorageError if several may; it says why and what to do.

        Until it has succeeded once, each call writes a probe object.
        """
        if self._is_create_only:
            return
        if problem := self._create_only_problem():
            raise StorageError(
                f"{self.url} cannot store checkpoints: {problem}. Two runs of one trial could both "
                f"commit there: {_CREATE_ONLY_ADVICE}"
            )
        self._is_create_only = True

    def check_usable(self) -> None:
        """Write, read back and delete a probe object, and compare its time with this machine's.
        Raises StorageError if one of these fails, the clocks differ by more than a minute, or a
        write cannot be create-only; it says why and what to do."""
        key = f"{PROBES}/{uuid.uuid4()}"
        data, began = key.encode(), datetime.now(timezone.utc)
        # fsspec's own set-up raises these for wrong options or a wrong URL.
        with self._errors.translated("use", TypeError, ValueError, KeyError):
            self.write(key, data)
        seen = self.read(key)
        if seen != data:
            raise StorageError(
                f"{self.url} does not return what was written to it ({key}: wrote {data!r}, read "
                f"{seen!r}): choose another storage for checkpoints"
            )
        probes = self.objects(PROBES)
        now = probes[key].modified_at if key in probes else None
        self.delete(key)
        self.check_clock(began, now)
        for other, probe in probes.items():  # of checks that were killed
            if now and probe.modified_at and now - probe.modified_at > PROBE_LIFETIME:
                self.remove(other)
        self.check_create_only()

    def check_clock(self, began: datetime, written_at: datetime | None) -> None:
        """Compare the time of a write by the storage's clock with this machine's: `began` is
        shortly before the write. Nothing is compared if the storage does not tell the time."""
        if written_at is None:
            return
        # Storages that count whole seconds round down.
        ahead = (written_at - datetime.now(timezone.utc)).total_seconds()
        behind = (began - written_at).total_seconds() - 1.0
        if max(ahead, behind) > MAX_CLOCK_DIFFERENCE_SECONDS:
            raise StorageError(
                f"the clock of {socket.gethostname()} says {began:%Y-%m-%d %H:%M:%S} UTC, and that "
                f"of {self.url} said {written_at.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC "
                "for an object written then. Runs on several machines need clocks that agree "
                f"within {MAX_CLOCK_DIFFERENCE_SECONDS:.0f} s: set the wrong one (NTP, chrony)"
            )

    def _create_only_problem(self) -> str | None:
        """Why several writers may create one object; None if one alone can. Writes a probe."""
        if _CONDITIONAL_PROTOCOLS.isdisjoint(protocols_of(self._fs)):
            return (
                "to create an object, fsspec looks first and writes then, and another process may "
                "write in between"
            )
        key = f"{PROBES}/{uuid.uuid4()}"
        path = self._path(key)
        with self._errors.translated(f"write {key} in"):
            try:
                return self._probe_create_only(path)
            finally:
                self.remove(key)

    def _probe_create_only(self, path: str) -> str | None:
        try:
            self._create_or_read(path, b"first")  # a lost reply is not a refusal
        except storage_exceptions() as error:
            if not is_refusal(error):
                raise
            self._put_small(path, b"first")  # raises if it accepts no writes at all
            return (
                f"{self._server()} refuses conditional writes (`If-None-Match: *`) "
                f"[{self._errors.shown(error)}]"
            )
        try:
            self._create(path, b"second")
        except storage_exceptions() as error:
            if not is_refusal(error):
                raise
            if self._read(path) == b"first":
                return None
        return f"{self._server()} ignores the condition of a write (`If-None-Match: *`)"

    def _server(self) -> str:
        return "its server"

    def _path(self, key: str) -> str:
        """The full name of an object or a folder. No key leads out of the storage: texts that are
        stored there are in some keys."""
        if key and not _is_plain(key):
            raise CheckpointError(
                f"{key!r} cannot be a key of {self.url}: it would lead out of a folder"
            )
        return f"{self._root}/{key}"

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        """fsspec's details of every object below a folder, by full name."""
        if not isinstance(self._fs, AsyncFileSystem):
            return dict(self._walk(path))
        # Object stores have no folders, so they never answer that one does not exist.
        found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        return found

    def _walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """As `_find`. fsspec's own walk reports a folder that it cannot list as empty."""
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] == "directory" and name.lstrip("/") != path.strip("/"):
                yield from self._walk(name)
            elif entry["type"] != "directory":
                yield name, entry

    def _read(self, path: str) -> bytes | None:
        """An object's bytes, or None. Of a too large one, reads one byte more than is allowed."""
        try:
            return self._get(path, MAX_OBJECT_BYTES + 1)
        except FileNotFoundError as error:
            if not self._is_absence(path, error):
                raise
            return None

    def _get(self, path: str, size_bytes: int) -> bytes:
        """The first bytes of an object, all of them if it is shorter."""
        try:
            data: bytes = self._fs.cat_file(path, start=0, end=size_bytes)
        except storage_exceptions() as error:
            if _RANGE_NOT_SATISFIABLE not in statuses(error):
                raise
            return b""  # Google Cloud has no range of an empty object
        return data

    def _is_absence(self, path: str, error: FileNotFoundError) -> bool:
        """Return whether the storage itself says that an object does not exist."""
        code = service_code(error)
        if code is not None:
            return code in ABSENCE_CODES
        # gcsfs raises this for a 404 of anybody, and drops the reply; a listing raises no 404.
        return not isinstance(self._fs, AsyncFileSystem) or path not in self._find(path)

    def _create_or_read(self, path: str, data: bytes) -> bytes | None:
        """Create an object; return None, or the bytes of the one that exists."""
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                self._create(path, data)
                return None
            except storage_exceptions() as error:
                failure = error
            # The error alone cannot tell a lost reply, a retry inside the client and a lost race
            # apart, and S3 servers use different codes for an existing key: so look.
            existing = self._read(path)
            if existing is not None:
                return existing
            last = attempt == _CREATE_ATTEMPTS - 1
            if last or service_code(failure) not in _TRY_AGAIN_CODES:
                raise failure
            time.sleep(0.1 * 2**attempt)
        return None

    def _create(self, path: str, data: bytes) -> None:
        # One small PUT: some servers ignore the condition on multipart uploads.
        self._put_small(path, data, mode="create")

    def _put_small(self, path: str, data: bytes, **options: Any) -> None:
        # Object stores have no folders; makedirs would create a bucket there.
        if not isinstance(self._fs, AsyncFileSystem):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data, **options)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        """Store the first `size_bytes` of a file; return their SHA-256 as hexadecimal digits."""
        with open(source, "rb") as file, tempfile.NamedTemporaryFile() as copy:
            is_longer = os.fstat(file.fileno()).st_size > size_bytes
            digest = sha256_of(file, size_bytes, stop, copy.file if is_longer else None)
            copy.flush()
            self._fs.put_file(copy.name if is_longer else str(source), self._path(key))
        return digest


def protocols_of(fs: Any) -> tuple[str, ...]:
    """The protocols of an fsspec file system; its `protocol` is a string or a tuple."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_plain(key: str) -> bool:
    """Return whether a key stays below the folders that it names."""
    return {"", ".", ".."}.isdisjoint(key.split("/"))


def _modified_at(details: Mapping[str, Any]) -> datetime | None:
    """When an object was last written, from fsspec's details, whose names differ by protocol."""
    for name in ("LastModified", "last_modified", "mtime", "created"):
        moment = details.get(name)
        if isinstance(moment, float):  # seconds since 1970: memory://
            return datetime.fromtimestamp(moment, timezone.utc)
        if isinstance(moment, datetime) and moment.tzinfo is not None:
            return moment
    return None
