"""Packs the code folder of a trial into an archive, and unpacks it.

The archive is a tar file of plain files: sorted, without times and owners. Equal code gives equal
bytes, so the storage holds it once.

What is code: all files of the folder, except those of `DEFAULT_IGNORED`, of an ignore file in the
folder, of virtual environments, of the runs' folder and of the storage. What is no code but was not
ignored either (large files, links that lead elsewhere) is left out with a warning.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pathspec

from trial_core.checkpoint import layout
from trial_core.errors import CheckpointDamaged, ConfigError
from trial_core.storage.storage_errors import ErrorTranslator
from trial_core.text_format import plural, size

IGNORE_FILES = (".trialflowignore", ".detignore")
"""Files of patterns as in .gitignore, in the code folder. The first one that exists counts."""

DEFAULT_IGNORED = (
    ".git/", ".hg/", ".svn/", "__pycache__/", "*.py[cod]", ".venv/", "venv/", ".tox/", ".nox/",
    ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", "*.egg-info/",
    "node_modules/", "trialflow-runs/", ".idea/", ".vscode/", ".DS_Store",
    # Credentials: others may read the storage.
    ".env", ".env.*", ".netrc", ".aws/", ".ssh/", "*.pem", "*.key",
)  # fmt: skip
"""Patterns that hold unless an ignore file says otherwise (``!name``)."""

MAX_FILE_BYTES = 8 * 2**20
MAX_TOTAL_BYTES = 32 * 2**20
MAX_FOLDER_FILES = 5000
"""A folder with more files, those of its folders included, holds data."""

_SHOWN = 10


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not part of the archive, though no pattern ignores it.

    Attributes:
        path: relative to the code folder.
        why: the reason; with its size, if that is the reason.
    """

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({self.why})"


@dataclass(frozen=True)
class PackedCode:
    """A packed code folder.

    Attributes:
        data: the archive; None: the folder has no code.
        left_out: what is missing in it.
    """

    data: bytes | None
    left_out: tuple[LeftOut, ...]

    def warning(self, folder: Path) -> str | None:
        """What people should know of the archive; None: nothing."""
        if not self.left_out:
            return None
        shown = ", ".join(map(str, self.left_out[:_SHOWN]))
        more = len(self.left_out) - _SHOWN
        return (
            f"checkpoints hold the code of {folder} without {shown}"
            f"{f' and {more} more' if more > 0 else ''}; a run or a script that uses their code "
            f"needs these files in another way. To leave files out without this warning, list them "
            f"in {folder / IGNORE_FILES[0]}"
        )


def pack_code(folder: Path, not_code: Collection[Path] = ()) -> PackedCode:
    """Pack a code folder.

    Args:
        not_code: folders that hold no code, wherever they are.

    Raises:
        ConfigError: the ignore file has a line that is no pattern.
    """
    walk = _Walk(folder, not_code)
    contents: dict[str, tuple[int, bytes]] = {}
    total_bytes = 0
    # The smallest first: what does not fit is more likely data than code.
    for size_bytes, name, path in sorted(walk.candidates()):
        if size_bytes > MAX_FILE_BYTES:
            walk.leave_out(name, f"{size(size_bytes)}; a file may have {size(MAX_FILE_BYTES)}")
            continue
        if total_bytes + size_bytes > MAX_TOTAL_BYTES:
            walk.leave_out(
                name, f"{size(size_bytes)}; all files may have {size(MAX_TOTAL_BYTES)} together"
            )
            continue
        try:
            contents[name] = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            walk.leave_out(name, f"cannot be read: {error.strerror}")
            continue
        total_bytes += len(contents[name][1])
    left_out = tuple(sorted(walk.left_out, key=lambda each: each.path))
    return PackedCode(_tar(contents) if contents else None, left_out)


def unpack_code(data: bytes, target: Path) -> None:
    """Unpack an archive into a new folder; replaces what is there.

    Raises:
        CheckpointDamaged: it is not an archive of `pack_code`.
        StorageError: `target` cannot be written.
    """
    with ErrorTranslator(str(target)).translated("write into"):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for name, mode, content in _members(data):
                path = unfinished / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(mode)
            unfinished.chmod(0o755)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


class _Walk:
    """The files of a code folder that may be code."""

    def __init__(self, folder: Path, not_code: Collection[Path]) -> None:
        self._folder = folder
        self._root = os.path.realpath(folder)
        self._not_code = {os.path.realpath(each) for each in not_code}
        self._ignored = _ignored(folder)
        self.left_out: list[LeftOut] = []

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append(LeftOut(name.encode("utf-8", "replace").decode(), why))

    def candidates(self) -> Iterator[tuple[int, str, Path]]:
        """Size, relative path and path of each file."""
        for name, path, is_folder in self._entries(self._folder, ""):
            if not is_folder:
                yield from self._file(name, path)
                continue
            found = list(islice(self._below(path, name, (self._root,)), MAX_FOLDER_FILES + 1))
            if len(found) > MAX_FOLDER_FILES:
                self.leave_out(f"{name}/", f"more than {plural(MAX_FOLDER_FILES, 'file')}")
            else:
                yield from found

    def _below(
        self, folder: Path, relative: str, trail: tuple[str, ...]
    ) -> Iterator[tuple[int, str, Path]]:
        """As `candidates`, of a folder below.

        Args:
            trail: the real paths of the folders above: a link may lead to one of them.
        """
        real = os.path.realpath(folder)
        if real in trail or real in self._not_code or _is_environment(folder):
            return
        if not real.startswith(f"{self._root}{os.sep}"):
            self.leave_out(f"{relative}/", f"a link to {real}, outside the code folder")
            return
        for name, path, is_folder in self._entries(folder, f"{relative}/"):
            if is_folder:
                yield from self._below(path, name, (*trail, real))
            else:
                yield from self._file(name, path)

    def _entries(self, folder: Path, prefix: str) -> Iterator[tuple[str, Path, bool]]:
        """Relative path, path and whether it is a folder, of what is not ignored in a folder."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self.leave_out(prefix or ".", f"cannot be read: {error.strerror}")
            return
        for entry in entries:
            # Not `entry.is_dir`, which raises if a link leads to itself.
            name, is_folder = f"{prefix}{entry.name}", os.path.isdir(entry.path)
            if self._ignored.match_file(f"{name}/" if is_folder else name):
                continue
            if not layout.is_file_path(name):
                self.leave_out(name, "a name that not every system allows")
                continue
            yield name, Path(entry.path), is_folder

    def _file(self, name: str, path: Path) -> Iterator[tuple[int, str, Path]]:
        try:
            found = path.stat()
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            if path.is_symlink():
                why = f"a link to {os.readlink(path)}, which leads to no file"
            self.leave_out(name, why)
            return
        if stat.S_ISREG(found.st_mode):
            yield found.st_size, name, path
        else:
            self.leave_out(name, "not a file")


def _ignored(folder: Path) -> pathspec.GitIgnoreSpec:
    """What is ignored in a code folder."""
    lines, name = [], ""
    for name in IGNORE_FILES:
        with contextlib.suppress(OSError):
            lines = (folder / name).read_text(errors="replace").splitlines()
            break
    for number, line in enumerate(lines, 1):
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError:
            raise ConfigError(
                f"{folder / name}, line {number}: {line!r} is not a pattern: expected one as in "
                ".gitignore; correct the line, or delete it"
            ) from None
    return pathspec.GitIgnoreSpec.from_lines([*DEFAULT_IGNORED, *lines])


def _is_environment(folder: Path) -> bool:
    """Whether a folder is a virtual environment of Python, or one of conda."""
    # Not `Path.exists`, which raises if the folder may not be searched.
    return os.path.exists(folder / "pyvenv.cfg") or os.path.isdir(folder / "conda-meta")


def _tar(contents: dict[str, tuple[int, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, (mode, content) in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if mode & stat.S_IXUSR else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _members(data: bytes) -> Iterable[tuple[str, int, bytes]]:
    """Name, permissions and content of each file of an archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                # Not `extractall`: this archive may come from a hostile storage.
                if not member.isreg() or member.issparse() or not layout.is_file_path(member.name):
                    raise CheckpointDamaged(
                        f"the code of the checkpoint holds {member.name!r}, which is not a plain "
                        "file below its folder: it may be hostile, do not use it"
                    )
                file = archive.extractfile(member)
                mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
                yield member.name, mode, file.read() if file is not None else b""
    except tarfile.TarError as error:
        raise CheckpointDamaged(
            f"the code of the checkpoint is not a tar file: {error}; use the original code folder"
        ) from error
