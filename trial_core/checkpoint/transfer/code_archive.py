"""The archive of a trial's code: a tar file of plain files.

The files are sorted, and have neither times nor owners: equal code gives equal bytes, so a node
that has unpacked it does not need it again.
"""

from __future__ import annotations

import io
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.errors import CheckpointDamaged

MAX_ARCHIVE_BYTES = 128 * 2**20
"""A larger archive is not read. `pack_code` makes none of even half this size."""

_UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""The errors that tarfile raises for wrong headers. It reads chained headers by recursion."""

File = tuple[int, bytes]
"""The permissions of a file, and its content."""


def tar(contents: Mapping[str, File]) -> bytes:
    """The archive of files by name. Of their permissions, it keeps the right to execute."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, (mode, content) in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if mode & stat.S_IXUSR else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def unpack_code(data: bytes, target: Path, what: str = "the code of the checkpoint") -> None:
    """Unpack an archive into a new folder, which replaces an existing one. Raises CheckpointDamaged
    if it is not an archive of `tar`, StorageError if `target` cannot be written."""
    contents = _contents(data, what)
    with ErrorTranslator(str(target)).translated("write into"):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for name, (mode, content) in contents.items():
                path = unfinished / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(mode)
            unfinished.chmod(0o755)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _contents(data: bytes, what: str) -> dict[str, File]:
    """The files of an archive. It may come from a hostile storage: no `extractall`."""
    contents: dict[str, File] = {}
    folders: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                name = member.name
                if not member.isreg() or member.issparse() or not layout.is_file_path(name):
                    raise _hostile(what, name, "which is not a plain file below its folder")
                file = archive.extractfile(member)
                content = file.read() if file is not None else b""
                if len(content) != member.size:
                    raise _hostile(what, name, f"whose size is said to be {member.size} bytes")
                if name in contents:
                    raise _hostile(what, name, "twice")
                contents[name] = 0o755 if member.mode & stat.S_IXUSR else 0o644, content
                folders.update(map(str, PurePosixPath(name).parents))
    except _UNREADABLE as error:
        raise CheckpointDamaged(
            f"{what} is not a tar file that trialflow has written: {type(error).__name__}: "
            f"{error}; use the original code folder"
        ) from error
    if both := sorted(contents.keys() & folders):
        raise _hostile(what, both[0], "both as a file and as a folder")
    return contents


def _hostile(what: str, name: str, problem: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{what} holds {name!r}, {problem}: it may be hostile, do not use it")
