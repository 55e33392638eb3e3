"""Lists the files of a folder that git tracks, and new ones that it does not ignore."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from trial_core.common.text_format import one_line

_TIMEOUT_SECONDS = 60.0
_KEPT_VARIABLES = ("GIT_CONFIG", "GIT_CEILING")
"""Prefixes of variables that say how git works. The others say on which repository."""


@dataclass(frozen=True)
class GitFiles:
    """The files of a folder in a git checkout, by their paths relative to the folder, with those of
    submodules and of checkouts within it: the files in git's index, and new ones that it does not
    ignore."""

    tracked: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)


class GitUnusable(Exception):
    """Git is not installed, or refuses to list the files."""


def git_files(folder: Path, with_new: bool = True) -> GitFiles | None:
    """The files that git holds of `folder`, a real path; None if it is no code of a git checkout. A
    checkout around the folder that ignores the whole folder (of a home folder's settings, for
    example) does not count. `with_new`: look for new files too, which reads the whole folder.

    Raises GitUnusable if git is not installed, takes a minute, or refuses: as in a checkout of
    another user ("dubious ownership").
    """
    if not any(os.path.lexists(each / ".git") for each in (folder, *folder.parents)):
        return None
    found = GitFiles()
    _collect(str(folder), "", found, with_new)
    return found if found.tracked or found.new else None


def _collect(folder: str, prefix: str, found: GitFiles, with_new: bool) -> None:
    """Add the files of one checkout. Git lists a checkout within it as one name."""
    kinds = [(found.tracked, ["--cached"])]
    if with_new:
        kinds.append((found.new, ["--others", "--exclude-standard"]))
    for names, options in kinds:
        for name in (each.rstrip("/") for each in _listed(folder, options)):
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isdir(path):
                names.add(prefix + name)
            elif os.path.lexists(os.path.join(path, ".git")):
                _collect(path, f"{prefix}{name}/", found, with_new)


def _listed(folder: str, options: list[str]) -> list[str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT_VARIABLES)
    } | {"LC_ALL": "C"}
    # Without a monitor of the file system: it is a command that the checkout's settings name.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", *options]
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise GitUnusable(str(error)) from error
    if done.returncode != 0:
        problem = one_line(done.stderr.decode(errors="replace"))
        if found := re.search("dubious ownership .*'(.+)'", problem):
            path = shlex.quote(found[1])
            problem += f"; if you trust it: git config --global --add safe.directory {path}"
        raise GitUnusable(problem or f"git ls-files: exit code {done.returncode}")
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
