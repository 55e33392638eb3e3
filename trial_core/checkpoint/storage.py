"""A storage: named bytes under a URL, in the few verbs that checkpoints need.

Over fsspec, so ``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://`` and whatever else it
knows. Keys are POSIX paths relative to the URL. Whatever goes wrong is a `StorageError`.
"""

from __future__ import annotations

import hashlib
import os
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import fsspec
import msgspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from trial_core.checkpoint.failures import Explainer, service_code, storage_exceptions
from trial_core.checkpoint.parallel import StopSignal
from trial_core.errors import CheckpointError, StorageError

READ_BYTES = 4 * 2**20
"""How much of a local file is in memory at once, a thread."""

_S3_PROTOCOLS = ("s3", "s3a")
_S3_CONCURRENCY = 4
_S3_PART_BYTES = 16 * 2**20
_S3_MAX_PARTS = 10_000
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
# AWS's answer to two conditional writes at once is that neither counts: "try again".
_TRY_AGAIN_CODES = ("ConditionalRequestConflict", "OperationAborted")
_CREATE_ATTEMPTS = 5


class StorageSpec(msgspec.Struct, frozen=True):
    """Where a storage is: plain data, which travels from the driver to the ranks.

    Attributes:
        url: fsspec URL of the root, absolute.
        options: for the file system. May hold credentials, so it is not shown.
    """

    url: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        shown = Explainer(self.url, self.options).url
        return f"StorageSpec(url={shown!r}, options=<{len(self.options)} not shown>)"


class Storage:
    """Named bytes below a URL. Safe to use from several threads.

    Attributes:
        url: the root as shown to people: without credentials.
    """

    def __init__(self, spec: StorageSpec, fs: Any, root: str) -> None:
        self.spec = spec
        self._fs = fs
        self._root = root.rstrip("/")
        self._explainer = Explainer(spec.url, spec.options)
        self.url = self._explainer.url.rstrip("/")

    @property
    def is_process_local(self) -> bool:
        """Whether what is stored is seen by this process alone."""
        return isinstance(self._fs, MemoryFileSystem)

    def read(self, key: str) -> bytes | None:
        """All bytes of a small object, None where there is none."""
        with self._explainer.explaining(f"read {key} in"):
            return self._read(self._path(key))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to, not including, `end`; fewer where the object ends."""
        with self._explainer.explaining(f"read {key} in"):
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=end)
            return data

    def create(self, key: str, data: bytes) -> None:
        """Store a small object under a key that must be free. Of several writers one succeeds.

        Succeeds as well where these very bytes are there already: the reply to an earlier attempt
        was lost, and it had done it. On file systems that know no conditional write (neither local
        disks nor S3, GCS and Azure), two writers that come at the same moment are not told apart.

        Raises:
            FileExistsError: other bytes are there.
        """
        path = self._path(key)
        with self._explainer.explaining(f"write {key} in"):
            existing = self._create_or_read(path, data)
        if existing is not None and existing != data:
            raise FileExistsError(f"{key} exists in {self.url}")

    def write(self, key: str, data: bytes) -> None:
        """Store a small object, whether or not the key is free."""
        with self._explainer.explaining(f"write {key} in"):
            self._make_folder_of(self._path(key))
            self._fs.pipe_file(self._path(key), data)

    def upload(self, source: Path, key: str, stop: StopSignal) -> tuple[int, str]:
        """Store a file, whether or not the key is free; return its size and ``sha256:…`` digest.

        Raises:
            CheckpointError: the file changed meanwhile.
        """
        digest = hashlib.sha256()
        with self._explainer.explaining(f"upload {source} to {key} in"):
            before = os.stat(source)
            with open(source, "rb") as file:
                while chunk := file.read(READ_BYTES):
                    stop.check()
                    digest.update(chunk)
            self._fs.put_file(str(source), self._path(key), **self._upload_options(before.st_size))
            after = os.stat(source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise CheckpointError(
                f"{source} changed while it was uploaded: a trial's save must have finished "
                "writing when it returns"
            )
        return before.st_size, f"sha256:{digest.hexdigest()}"

    def sizes(self, folder: str) -> dict[str, int]:
        """Keys and sizes of all objects below a folder; empty where there is no such folder."""
        with self._explainer.explaining(f"list {folder} in"):
            # Another process may have written since: no listing may come from a cache.
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(folder), detail=True)
            except FileNotFoundError as error:
                if service_code(error) == "NoSuchBucket":
                    raise
                return {}
        prefix = self._root.lstrip("/")
        keys = {name.lstrip("/")[len(prefix) :].lstrip("/"): name for name in found}
        return {
            key: int(found[name]["size"])
            for key, name in keys.items()
            if key.startswith(f"{folder}/")
        }

    def delete(self, key: str) -> None:
        """Delete an object."""
        with self._explainer.explaining(f"delete {key} in"):
            self._fs.rm_file(self._path(key))

    def try_out(self, key: str) -> None:
        """Write, read back and delete an object; the first use of a storage shows what is amiss.

        Raises:
            StorageError: it is not usable, and why.
        """
        data = key.encode()
        # From the file system's own set-up these come where the options or the URL are wrong.
        with self._explainer.explaining("use", TypeError, ValueError, KeyError):
            self.write(key, data)
        seen = self.read(key)
        if seen != data:
            raise StorageError(
                f"{self.url} does not give back what was written to it ({key}: wrote "
                f"{data!r}, read {seen!r}): it cannot hold checkpoints"
            )
        self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _read(self, path: str) -> bytes | None:
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError as error:
            if service_code(error) == "NoSuchBucket":
                raise
            return None
        return data

    def _create_or_read(self, path: str, data: bytes) -> bytes | None:
        """None when created; else the bytes that were there."""
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                self._create(path, data)
                return None
            except storage_exceptions() as error:
                # Whatever the error: what is there now tells how it went. A lost reply, a retry
                # inside the client and a lost race look alike from here, and S3 servers do not
                # even agree on how to say that the key is taken.
                existing = self._read(path)
                last = attempt == _CREATE_ATTEMPTS - 1
                if existing is None and (last or service_code(error) not in _TRY_AGAIN_CODES):
                    raise
                if existing is not None:
                    return existing
            time.sleep(0.1 * 2**attempt)
        return None

    def _create(self, path: str, data: bytes) -> None:
        # One small PUT: over multipart uploads some servers ignore the condition.
        self._make_folder_of(path)
        self._fs.pipe_file(path, data, mode="create")

    def _make_folder_of(self, path: str) -> None:
        """Object stores have no folders; on them, making one would make a bucket."""
        if not isinstance(self._fs, AsyncFileSystem):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _upload_options(self, size_bytes: int) -> dict[str, Any]:
        if not _is_s3(self._fs):
            return {}
        # Memory in use is parts x concurrency; s3fs's own 50 MiB x 10 a file is a lot.
        smallest_allowed = -(-size_bytes // _S3_MAX_PARTS)
        return {"chunksize": max(_S3_PART_BYTES, smallest_allowed)}


def connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the root within it. No request is sent yet.

    Raises:
        StorageError: the URL is none, or a package for it is not installed.
    """
    explainer = Explainer(url, options)
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if protocol in _S3_PROTOCOLS:
        # Other processes write: a listing remembered is a listing that may be wrong.
        options = {"use_listings_cache": False, "max_concurrency": _S3_CONCURRENCY, **options}
    elif "://" not in url and "::" not in url:
        url = os.path.abspath(os.path.expanduser(url))
    if "::" not in protocol and protocol not in fsspec.available_protocols():
        near = get_close_matches(protocol, ["file", "memory", *_PACKAGES], n=1)
        hint = f"; did you mean {near[0]}://?" if near else ""
        raise StorageError(
            f"{explainer.url}: no kind of storage is called {protocol}://{hint} "
            "(file://, memory://, s3://, gs://, az:// and what else fsspec knows)"
        )
    try:
        with explainer.explaining("use", TypeError, ValueError, KeyError):
            fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"pip install {package}" if package else known_implementations[protocol]["err"]
        raise StorageError(
            f"{explainer.url}: {protocol}:// needs a package that is not installed: {advice}"
        ) from error
    if _is_s3(fs) and not root:
        raise StorageError(f"{explainer.url} names no bucket: write s3://bucket/folder")
    return fs, root


def is_local(fs: Any) -> bool:
    """Whether it is this machine's own file system."""
    return isinstance(fs, LocalFileSystem)


def _is_s3(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not set(_S3_PROTOCOLS).isdisjoint(protocols)
