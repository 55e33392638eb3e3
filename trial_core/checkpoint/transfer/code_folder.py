"""Packs the code folder of a trial into an archive: the files that version control would hold.

These rules decide, in this order:

1. No link that leads out of the folder; nothing of the runs' folder, of a storage, of a virtual
   environment.
2. An ignore file in the folder decides: a pattern leaves files out, ``!pattern`` takes them in.
3. In a git checkout, the files that git tracks, and new ones that it does not ignore: a module that
   was not added yet is part of the run. Elsewhere, all files that no .gitignore in it ignores.
4. A file that git does not track must not match `DEFAULT_IGNORED`, and must be one of `KINDS`.
5. Whatever git and the patterns say: no file that is named like credentials, and none with a key, a
   token or the experiment's credentials in it. A line ``!/path`` takes in the file of that path if
   its text only looks like a key or token.
6. No file over `MAX_FILE_BYTES`. Each checkpoint has a copy: the archive is bounded as well.

The ignore file, git and `DEFAULT_IGNORED` leave files out without a warning, except modules that
git ignores, and folders with modules: they may be generated code. The other rules warn.

Of a home folder, only the files that git tracks are packed; nothing, if git tracks none.

The files are read again only if the status of one has changed: a search packs for each training.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

import pathspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.transfer.code_archive import File, tar
from trial_core.checkpoint.transfer.git_files import GitFiles, GitUnusable, git_files
from trial_core.checkpoint.transfer.secret_scan import (
    OWN,
    PRIVATE_KEY,
    credentials_in,
    is_named_as_credentials,
    searchable,
)
from trial_core.common.text_format import clean, plural, size
from trial_core.errors import ConfigError

IGNORE_FILES = (".trialflowignore", ".detignore")
"""Files of patterns as in .gitignore, in the code folder. The first one that exists counts."""

DEFAULT_IGNORED = (
    ".*", *(f"!{name}" for name in IGNORE_FILES), "__pycache__/", "*.py[cod]", "venv/",
    "*.egg-info/", "node_modules/", "trialflow-runs/",
)  # fmt: skip
"""Patterns of untracked files that are left out: hidden files, caches, the runs."""

KINDS = frozenset(
    {
        # Python, and the sources of its extensions
        ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp",
        ".hxx", ".cu", ".cuh", ".inl", ".cl", ".metal", ".rs", ".proto",
        # programs and settings
        ".sh", ".bash", ".sbatch", ".cmake", ".mk", ".yaml", ".yml", ".json", ".toml", ".ini",
        ".cfg", ".conf", ".properties", "Makefile", "Dockerfile", *IGNORE_FILES,
        # text
        ".txt", ".md", ".rst", ".j2", ".jinja", ".tmpl", ".sql", "LICENSE", "README",
    }
)  # fmt: skip
"""The endings, or whole names, of files that are packed though git does not track them."""
_MODULES = (".py", ".so", ".pyd")
_IGNORED_MODULES = "git ignores it; has modules"

MAX_FILE_BYTES = 8 * 2**20
MAX_TOTAL_BYTES = 32 * 2**20
"""The size of all files together, packed."""
MAX_FOLDER_FILES = 5000
"""A folder with more files, subfolders included, holds data: its most common kinds of files are
left out, but no modules. So does the code folder with more files of its own. A folder with ten
times as many is left out."""

_MEMBER_BYTES = 1024  # the header of a file in the archive, and the padding of its last block
_SHOWN = 10
_UNREADABLE = "cannot be read"

TAKE_IN = "a line !NAME takes in a file or folder that git ignores, or a file of any kind"
TAKE_IN_EXACTLY = "a line !/PATH takes in the one file of that path, if what it holds is no secret"
"""The line that takes a file in, for people."""


@dataclass(frozen=True)
class LeftOut:
    """A file, or files, that the archive lacks, though a run may need them. `path` is relative to
    the code folder: of a file, of a folder (``data/``), or ``*.csv``; `remedy` is the ignore file's
    line that takes it in, or empty."""

    path: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join(clean(f"{self.path} ({self.why})").split("\n"))

    @property
    def is_module(self) -> bool:
        return self.path.endswith(_MODULES) or self.why == _IGNORED_MODULES


@dataclass(frozen=True)
class PackedCode:
    """A packed code folder.

    Attributes:
        data: the archive; None if the folder has no code.
        files: the files in it and their sizes in bytes, by their names.
        left_out, rule: the files missing in it, modules first; and which files were considered.
        problem: says that git could not list a checkout, or that it is a home folder.
    """

    data: bytes | None
    files: dict[str, int]
    left_out: tuple[LeftOut, ...]
    rule: str
    problem: str | None = None

    def summary(self, folder: Path) -> str:
        total = size(sum(self.files.values()))
        return f"the code of {folder}: {plural(len(self.files), 'file')}, {total} ({self.rule})"

    def warnings(self, folder: Path) -> Iterator[str]:
        if self.problem is not None:
            yield self.problem
        if not self.left_out:
            return
        shown = ", ".join(map(str, self.left_out[:_SHOWN]))
        more = len(self.left_out) - _SHOWN
        remedies = {each.remedy: None for each in self.left_out if each.remedy}
        lines = ["a line NAME leaves a file out without this warning", *remedies]
        yield (
            f"checkpoints hold the code of {folder} without {shown}"
            f"{f' and {more} more' if more > 0 else ''}; a run or a script that uses their code "
            f"needs these files in another way. In {folder / IGNORE_FILES[0]}, {'; '.join(lines)}"
        )


def check_code_folder(folder: Path) -> None:
    """Refuse a folder of which nothing could be sent to nodes: it is the user's home folder or
    holds it, or it is the root of a file system, and git tracks nothing of it. Raises
    ConfigError."""
    if (problem := _holds_much(folder)) is not None and _held_by_git(folder, problem)[0] is None:
        raise ConfigError(
            f"code: {problem}: move the trial or script and its experiment to a folder for them "
            "alone, name such a folder as code, or have git track the code"
        )


def _holds_much(folder: Path) -> str | None:
    """Why a folder holds much besides code (credentials, caches, other projects), or None."""
    # Of a user without a home folder: /~, which the root of the file system holds as well.
    home = Path(os.path.realpath(os.path.join("/", os.path.expanduser("~"))))
    if not home.is_relative_to(os.path.realpath(folder)):
        return None
    return f"{folder} holds the home folder of this user, with much besides code"


def _held_by_git(folder: Path, much: str | None) -> tuple[GitFiles | None, str | None]:
    """The files that git holds of a folder, and why it cannot list them."""
    try:
        return git_files(Path(os.path.realpath(folder)), with_new=much is None), None
    except GitUnusable as error:
        how = "so they are chosen by their kinds" if much is None else "and without it none are"
        return None, f"git cannot list the files of {folder}, {how}: {error}"


def pack_code(
    folder: Path, not_code: Collection[Path] = (), secrets: Collection[str] = ()
) -> PackedCode:
    """Pack a code folder. Raises ConfigError if a line of the ignore file is not a pattern.

    Args:
        not_code: files and folders that are not code, wherever they are.
        secrets: credentials of the experiment. A file that has one in it is left out.
    """
    much = _holds_much(folder)
    held, problem = _held_by_git(folder, much)
    if much is not None:
        if held is None:
            problem = f"{much}: checkpoints get no code of it{f'; {problem}' if problem else ''}"
            return PackedCode(None, {}, (), "nothing of a home folder", problem)
        problem = f"{much}: checkpoints get only the files that git tracks"
    walk = _Walk(folder, not_code, held, has_new=much is None)
    # The smallest first: a file that does not fit is more likely data than code.
    candidates = tuple(sorted(walk.candidates()))
    exact_names, hidden = frozenset(walk.exact_names), tuple(searchable(secrets))
    data, files, unread = _archive(walk.root, candidates, exact_names, hidden)
    if any(each.why.startswith(_UNREADABLE) for each in unread):
        _archive.cache_clear()  # it may be readable the next time, with the same status
    left_out = sorted(walk.left_out + unread, key=lambda each: (not each.is_module, each.path))
    rule = "by their kinds" if held is None else "tracked by git, or new"
    return PackedCode(data, dict(files), tuple(left_out), rule, problem)


@dataclass(frozen=True, order=True)
class _File:
    """A file that may be packed.

    Attributes:
        name, real: its path in the code folder, and that of the file that a link leads to.
        is_known: True if git tracks it, or a pattern takes it in.
        version: its device and inode, and when it was changed: others if its content is another.
    """

    size_bytes: int
    name: str
    real: str
    mode: int
    is_known: bool
    version: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The ending of its name, if that has one, else the name."""
        path = PurePosixPath(self.name)
        return path.suffix.lower() or path.name


@lru_cache(maxsize=1)
def _archive(
    root: str,
    candidates: tuple[_File, ...],
    exact_names: Collection[str],
    secrets: tuple[bytes, ...],
) -> tuple[bytes | None, dict[str, int], list[LeftOut]]:
    """The archive of the files that may be packed, their sizes by name, and the ones left out."""
    contents: dict[str, File] = {}
    left_out: list[LeftOut] = []
    total_bytes = 0
    for file in candidates:
        if file.size_bytes > MAX_FILE_BYTES:
            limit = f"a file may have {size(MAX_FILE_BYTES)}"
            left_out.append(LeftOut(file.name, f"{size(file.size_bytes)}; {limit}"))
            continue
        if total_bytes + file.size_bytes + _MEMBER_BYTES > MAX_TOTAL_BYTES:
            limit = f"all files may have {size(MAX_TOTAL_BYTES)} together"
            left_out.append(LeftOut(file.name, f"{size(file.size_bytes)}; {limit}"))
            continue
        try:
            content = Path(root, file.real).read_bytes()
        except OSError as error:
            left_out.append(LeftOut(file.name, f"{_UNREADABLE}: {error.strerror}"))
            continue
        if (found := credentials_in(file.name, content, secrets)) is not None:
            is_certain = found in (OWN, PRIVATE_KEY)
            if is_certain or file.name not in exact_names:
                remedy = "" if is_certain else TAKE_IN_EXACTLY
                left_out.append(LeftOut(file.name, f"holds {found}", remedy))
                continue
        contents[file.name] = file.mode, content
        total_bytes += len(content) + _MEMBER_BYTES
    sizes = {name: len(content) for name, (_, content) in sorted(contents.items())}
    return tar(contents) if contents else None, sizes, left_out


class _Walk:
    """The packed files of a code folder, and the ones left out. Paths are relative to the folder.
    Links are followed within it: a file has the name by which the walk came to it, and a real one,
    and is judged by both."""

    def __init__(
        self, folder: Path, not_code: Collection[Path], git: GitFiles | None, has_new: bool
    ) -> None:
        self.root = os.path.realpath(folder)
        self._not_code = {os.path.realpath(each) for each in not_code}
        self._patterns, self.exact_names = _patterns(folder)
        self._defaults = pathspec.GitIgnoreSpec.from_lines(DEFAULT_IGNORED)
        self._git, self._has_new = git, has_new
        self._git_ignores: dict[str, pathspec.GitIgnoreSpec] = {}
        if git is not None:
            new = {name for name in git.new if not self._defaults.match_file(name)}
            self._held = git.tracked | new
            self._held_folders = {
                str(parent) for name in self._held for parent in PurePosixPath(name).parents
            }
        self.left_out: list[LeftOut] = []

    def leave_out(self, name: str, why: str, remedy: str = "") -> None:
        self.left_out.append(LeftOut(name.encode("utf-8", "replace").decode(), why, remedy))

    def candidates(self) -> Iterator[_File]:
        """The candidates of known kinds, without files that are named like credentials."""
        others: dict[str, list[str]] = defaultdict(list)
        for file in self._found():
            if not file.is_known and file.kind not in KINDS:
                others[file.kind].append(file.name)
            elif any(map(is_named_as_credentials, (file.name, file.real))):
                self.leave_out(file.name, "a name of files with credentials")
            else:
                yield file
        for kind, names in others.items():
            why = "packed only if git tracks it"
            if len(names) == 1:
                self.leave_out(names[0], why, TAKE_IN)
            else:
                self.leave_out(_pattern_of(kind), f"{plural(len(names), 'file')}; {why}", TAKE_IN)

    def _found(self) -> Iterator[_File]:
        """The files that git or a pattern holds; elsewhere, all that are not ignored."""
        own: list[_File] = []
        for each in self._entries("", ""):
            if isinstance(each, _File):
                own.append(each)
                continue
            most = 10 * MAX_FOLDER_FILES
            found = list(islice(self._below(*each, ("",)), most + 1))
            if len(found) > most:
                self.leave_out(f"{each[0]}/", f"more than {plural(most, 'file')}")
            else:
                yield from self._few(found, f"{each[0]}/**/", "a folder may have")
        yield from self._few(own, "", "there may be, besides those of folders,")

    def _few(self, files: list[_File], place: str, limit: str) -> list[_File]:
        """The files, without the most common kinds if there are too many, but with all modules."""
        while len(files) > MAX_FOLDER_FILES:
            kinds = Counter(each.kind for each in files if each.kind not in _MODULES)
            if not kinds:
                break
            kind, count = kinds.most_common(1)[0]
            why = f"{plural(count, 'file')}; {limit} {MAX_FOLDER_FILES}"
            self.leave_out(f"{place}{_pattern_of(kind)}", why)
            files = [each for each in files if each.kind != kind]
        return files

    def _below(self, name: str, real: str, trail: tuple[str, ...]) -> Iterator[_File]:
        """As `_found`, of a folder below. `trail`: the real paths of the folders above, to one
        of which a link may lead."""
        path = os.path.join(self.root, real)
        if real in trail or path in self._not_code or _is_environment(path):
            return
        for each in self._entries(name, real):
            if isinstance(each, _File):
                yield each
            else:
                yield from self._below(*each, (*trail, real))

    def _entries(self, name: str, real: str) -> Iterator[_File | tuple[str, str]]:
        """The files in a folder, and the names and real paths of the folders in it."""
        try:
            entries = sorted(os.scandir(f"{self.root}/{real}"), key=lambda entry: entry.name)
        except OSError as error:
            self.leave_out(f"{name}/" if name else ".", f"{_UNREADABLE}: {error.strerror}")
            return
        for entry in entries:
            inner, here = (f"{each}/{entry.name}".lstrip("/") for each in (name, real))
            if (judged := self._judged(entry, inner, here)) is not None:
                yield judged

    def _judged(
        self, entry: os.DirEntry[str], name: str, here: str
    ) -> _File | tuple[str, str] | None:
        """A file, or the name and real path of a folder; None if it is left out. `here`: its path
        without the links above it."""
        # Not `entry.is_dir`, which raises if a link leads to itself.
        is_link, is_folder = entry.is_symlink(), os.path.isdir(entry.path)
        target = os.path.realpath(entry.path) if is_link else ""
        real = os.path.relpath(target, self.root) if is_link else here
        is_outside = is_link and real.split("/")[0] == ".."
        ending = "/" if is_folder else ""
        says = self._says({name + ending, *([] if is_outside else [real + ending])})
        if says is False or entry.name == ".git":
            return None
        if not says and not self._holds(here, is_folder and not is_link):
            self._note_ignored(entry, name, here, is_folder and not is_link)
            return None
        try:
            found = os.stat(entry.path)
        except OSError as error:
            why = f"{_UNREADABLE}: {error.strerror}"
            if is_link:
                why = f"a link to {os.readlink(entry.path)}, which leads to no file"
            self.leave_out(name, why)
            return None
        if is_outside:
            why = f"a link to {target}, outside the code folder"
        elif is_link and not says and not self._holds(real, is_folder):
            why = f"a link to {real}, which is left out"
        elif not layout.is_file_path(name):
            why = "a name that not every system allows"
        elif is_folder:
            return name, "" if real == "." else real
        elif f"{self.root}/{real}" in self._not_code:
            return None
        elif stat.S_ISREG(found.st_mode):
            is_known = says or (self._git is not None and real in self._git.tracked)
            version = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
            return _File(found.st_size, name, real, found.st_mode, bool(is_known), version)
        else:
            why = "not a file"
        self.leave_out(name + ending, why)
        return None

    def _note_ignored(self, entry: os.DirEntry[str], name: str, here: str, is_folder: bool) -> None:
        """Note a module, or a folder with modules, that git ignores. No folder is packed for it."""
        ending = "/" if is_folder else ""
        if self._git is None and self._defaults.match_file(here + ending):
            return
        if not is_folder:
            if here.endswith(_MODULES) and (self._git is None or here not in self._git.new):
                why = "git ignores it" if self._has_new else "git does not track it"
                self.leave_out(name, why, TAKE_IN)
        elif self._has_new and self._has_modules(entry.path):
            self.leave_out(f"{name}/", _IGNORED_MODULES, TAKE_IN)

    def _has_modules(self, folder: str) -> bool:
        """Return whether a module is among the first files in a folder, except in environments."""
        folders, left = [folder], MAX_FOLDER_FILES
        while folders and left > 0:
            path = folders.pop()
            is_code = path not in self._not_code and not _is_environment(path)
            if not is_code or self._defaults.match_file(f"{os.path.basename(path)}/"):
                continue
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in islice(entries, left):
                    left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith(_MODULES):
                        return True
        return False

    def _says(self, paths: set[str]) -> bool | None:
        """True if the ignore file takes in all paths, False if it leaves one out, else None."""
        found = {self._patterns.check_file(each).include for each in paths}
        return False if True in found else True if found == {False} else None

    def _holds(self, path: str, is_folder: bool) -> bool:
        """Return whether git holds a file or files of a folder; elsewhere, if it is not ignored."""
        if self._git is None:
            path += "/" if is_folder else ""
            return not self._defaults.match_file(path) and not self._is_git_ignored(path)
        return path in (self._held_folders if is_folder else self._held)

    def _is_git_ignored(self, path: str) -> bool:
        """Return whether a file .gitignore above a path in the code folder ignores it."""
        for parent in map(str, PurePosixPath(path).parents):
            if parent not in self._git_ignores:
                spec = pathspec.GitIgnoreSpec.from_lines([])
                with contextlib.suppress(OSError, ValueError):  # a line that is not a pattern
                    file = Path(self.root, parent, ".gitignore")
                    spec = pathspec.GitIgnoreSpec.from_lines(file.read_text().splitlines())
                self._git_ignores[parent] = spec
            inner = path if parent == "." else path[len(parent) + 1 :]
            if (found := self._git_ignores[parent].check_file(inner).include) is not None:
                return found
        return False


def _patterns(folder: Path) -> tuple[pathspec.GitIgnoreSpec, set[str]]:
    """The patterns of the ignore file of a code folder, and the files that lines !/path name."""
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
    exact = {line[1:].strip().lstrip("/") for line in lines if re.match("!.*/.", line)}
    return pathspec.GitIgnoreSpec.from_lines(lines), exact


def _pattern_of(kind: str) -> str:
    return f"*{kind}" if kind.startswith(".") else kind


def _is_environment(folder: str) -> bool:
    # Not `Path.exists`, which raises if the folder may not be searched.
    return os.path.exists(f"{folder}/pyvenv.cfg") or os.path.isdir(f"{folder}/conda-meta")
