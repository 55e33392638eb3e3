"""Finds out that an entrypoint's module, class or script is missing, without starting ranks.

Reports only certain problems: a module may make names in ways that its text does not show.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from trial_core.checkpoint.layout import MANIFEST_NAME
from trial_core.checkpoint.manifest import Manifest
from trial_core.common.python_source import without_collections
from trial_core.errors import CheckpointError, TrialError
from trial_core.schedule.command import command_of, is_command

_MAKE_NAMES = frozenset((
    "*", "sys.modules", "globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__",
    "__path__",
))  # fmt: skip
"""Names in the text of a module that may define others, or modules, at run time."""


def checked_entrypoint(stored: str, own: str, folder: Path, storage_url: str) -> str:
    """Check and return an entrypoint that a checkpoint names, and that runs in another experiment.

    A writer to the storage must not choose a program or a module of this machine.

    Args:
        own: the experiment's entrypoint.
        folder: the experiment's code folder, in which the storage may be.

    Raises:
        TrialError: it is another command, or not of a module in `folder` or in `own`'s package; or
            its module is in the storage, or in a checkpoint that was downloaded.
    """
    if stored == own:
        return stored
    parts, own_package = stored.partition(":")[0].split("."), re.split("[.:]", own)[0]
    # A folder of a run, or a fetched one as checkpoint-5, has another name.
    is_known = all(map(str.isidentifier, parts)) and (
        parts[0] == own_package
        or any(os.path.exists(folder / name) for name in (parts[0], f"{parts[0]}.py"))
    )
    root, storage = folder.resolve(), Path(storage_url.removeprefix("file://")).resolve()
    # A link leads into the storage, or one in it leads out: so each folder on the way.
    places = (folder.joinpath(*parts[:end]).resolve() for end in range(1, len(parts) + 1))
    way = [*places] if is_known else []
    if storage not in (root, *root.parents):
        is_known = is_known and not any(storage in (each, *each.parents) for each in way)
    is_known = is_known and not any(map(_is_checkpoint, way))
    if is_command(stored) or not is_known:
        raise TrialError(
            f"the checkpoint names the entrypoint {stored!r}; expected module:Class of {folder}, "
            f"or of the package {own_package}: restore that code, or promote another version"
        )
    return stored


def _is_checkpoint(folder: Path) -> bool:
    """True for a folder into which a checkpoint was downloaded, whole or in part."""
    for name in (MANIFEST_NAME, f".{MANIFEST_NAME}.part"):
        with suppress(OSError, CheckpointError):
            if (folder / name).is_file():  # no pipe, which would not end
                Manifest.from_json((folder / name).read_bytes())
                return True
    return False


def entrypoint_problem(
    entrypoint: str, folder: str, python_path: str = "", has_all_packages: bool = True
) -> str | None:
    """Return why ranks cannot find an experiment's entrypoint, for people; None if they may.

    Args:
        folder: the code folder.
        python_path: the ranks' PYTHONPATH, if it differs from this process's.
        has_all_packages: True if this process sees the packages that ranks have.
    """
    name, _, attributes = entrypoint.partition(":")
    if (command := command_of(entrypoint)) is not None:
        name = command.target
        if not command.is_module:
            is_there = os.path.isfile(os.path.join(folder, name))
            return None if is_there else _missing(entrypoint, "script", name, folder)
    names: frozenset[str] = frozenset()
    search: Sequence[str] | None = [folder, *filter(None, python_path.split(os.pathsep))]
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:end]), search)
        if spec is None:
            is_certain = has_all_packages and names.isdisjoint(_MAKE_NAMES)
            return _missing(entrypoint, "module", name, folder) if is_certain else None
        try:
            names = _names(spec)
        except (SyntaxError, ValueError) as error:
            what = f"{spec.origin}, line {getattr(error, 'lineno', None) or '?'}"
            return f'entrypoint "{entrypoint}": {what}: {getattr(error, "msg", error)}'
        search = spec.submodule_search_locations
    wanted = attributes.partition(".")[0]
    if command is not None or wanted in names or not names.isdisjoint(_MAKE_NAMES):
        return None
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f'entrypoint "{entrypoint}": module {name} has no "{wanted}"{hint}'


def _missing(entrypoint: str, kind: str, name: str, folder: str) -> str:
    there = sorted(file for file in os.listdir(folder) if file.endswith(".py"))
    if kind == "module":
        there, name = [file.removesuffix(".py") for file in there], f'"{name}"'
    near = difflib.get_close_matches(name.strip('"').removesuffix(".py"), there, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return (
        f'entrypoint "{entrypoint}": there is no {kind} {name} in {folder} '
        f"({kind}s there: {', '.join(there) or 'none'}){hint}"
    )


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module without importing it. None if it is missing, or its parent is not a package."""
    PathFinder.invalidate_caches()
    found = None if search is None else PathFinder.find_spec(name, search)
    if found is None and "." not in name:
        with suppress(ValueError):  # this process has such a module without a spec
            return find_spec(name)
    return found


def _names(spec: ModuleSpec) -> frozenset[str]:
    """Return the names in a module's text. Raises as `ast.parse` if it is not Python."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return frozenset() if spec.submodule_search_locations else _MAKE_NAMES
    try:
        with without_collections():
            nodes = [*ast.walk(ast.parse(Path(spec.origin).read_bytes()))]
    except OSError:
        return _MAKE_NAMES
    found = {getattr(node, kind, None) for node in nodes for kind in ("name", "asname", "id")}
    found |= {
        f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return frozenset(filter(None, found))
