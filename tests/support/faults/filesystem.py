"""``faulty://PLAN/folder``: a fsspec file system that fails on purpose, over the local one.

trialflow knows it neither as local nor as S3, so it uses fsspec's own methods, as on ``gs://`` and
``az://``: an object appears whole, and may be create-only. Options must be plain data, so a plan is
known by a name: ``with planned("name", Plan(…)):``.

``cut request``: not carried out, and the connection ends; ``cut reply``: a read
returns its first `byte` bytes, without an error; ``lose reply``: carried out, then the connection
ends; ``500``: an input/output error; ``503``: a timeout; ``slow``: at `bytes_per_second`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.support.faults.plan import Plan, Seen
from trial_core.checkpoint.storage import base
from trial_core.checkpoint.storage.local_files import atomic_file

PROTOCOL = "faulty"
_plans: dict[str, Plan] = {}


@contextmanager
def planned(name: str, plan: Plan, *, is_known: bool = True) -> Iterator[Plan]:
    """Within the block, `plan` applies to ``faulty://{name}``.

    Args:
        is_known: whether trialflow knows that such a file system has conditional writes.
    """
    fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
    _plans[name] = plan
    known = {*base._CONDITIONAL_PROTOCOLS, PROTOCOL} if is_known else set()
    try:
        with mock.patch.object(base, "_CONDITIONAL_PROTOCOLS", known):
            yield plan
    finally:
        del _plans[name]


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A file system over the local one. Each operation asks a plan."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem(auto_mkdir=False)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{PROTOCOL}://").rstrip("/")

    # ------------------------------------------------------------------------------- reading

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        data: bytes = self._do("cat_file", path, lambda p: self._local.cat_file(p, start, end))
        return data

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = self._do("info", path, self._local.info)
        return {**found, "name": path}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        def entries_of(local: str) -> list[dict[str, Any]]:
            here = self._local.ls(local, detail=True)
            return [{**each, "name": path + each["name"].removeprefix(local)} for each in here]

        path = self._strip_protocol(path)
        entries = self._do("ls", path, entries_of)
        return entries if detail else [each["name"] for each in entries]

    # ------------------------------------------------------------------------------- writing

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._do("pipe_file", path, lambda p: _write(p, value, is_new=mode == "create"))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if Path(lpath).is_dir():
            return self.makedirs(rpath, exist_ok=True)
        return self._do("put_file", rpath, lambda p: _write(p, Path(lpath).read_bytes()))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        if self.isdir(path1):
            return self.makedirs(path2, exist_ok=True)
        return self.pipe_file(path2, self.cat_file(path1))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._do("makedirs", path, lambda p: self._local.makedirs(p, exist_ok=exist_ok))

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        self._do("mkdir", path, lambda p: self._local.mkdir(p, create_parents))

    def rmdir(self, path: str) -> None:
        self._do("rmdir", path, self._local.rmdir)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            self.rmdir(each) if self.isdir(each) else self.rm_file(each)

    def rm_file(self, path: str) -> None:
        self._do("rm_file", path, self._local.rm_file)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "x" in mode and self.exists(path):
            raise FileExistsError(path)
        return _WholeFile(self, path, mode)

    # ------------------------------------------------------------------------------- the plan

    def _do(self, operation: str, path: str, work: Callable[[str], Any]) -> Any:
        """Carry out `work` on the local path, unless the plan has a fault for it."""
        name, _, rest = self._strip_protocol(path).partition("/")
        seen, local = _plans[name].next(name, operation, path), f"/{rest}"
        kind = seen.fault.kind if seen.fault else None
        if kind == "500":
            raise OSError(errno.EIO, f"injected into {seen}")
        if kind == "503":
            raise TimeoutError(f"injected into {seen}")
        if kind == "cut request":
            raise _cut(seen)
        done = work(local)
        if kind == "lose reply":
            raise _cut(seen)
        if seen.fault and isinstance(done, bytes):
            if kind == "cut reply":
                return done[: seen.fault.byte]
            if kind == "slow":
                time.sleep(len(done) / seen.fault.bytes_per_second)
        return done


class _WholeFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. It is read in ranges and written when it is closed."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return final


def _write(local: str, data: bytes, *, is_new: bool = False) -> None:
    Path(local).parent.mkdir(parents=True, exist_ok=True)  # object stores have no folders
    with atomic_file(Path(local), is_durable=False, is_new=is_new) as file:
        file.write(data)


def _cut(seen: Seen) -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, f"injected into {seen}")
