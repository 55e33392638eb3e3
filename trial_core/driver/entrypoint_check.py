"""Finds without ranks, and without torch, that an entrypoint's module, class or script is missing.

Only what is certain is refused: a module may make names in ways that its text does not show.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from trial_core.config import ExperimentConfig
from trial_core.config.command import command_of
from trial_core.errors import ConfigError

_UNKNOWN = ast.parse("exec()")
"""Stands for a module whose text cannot be read."""
_MAKES_NAMES = {"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__", "__path__"}


def refuse_missing_entrypoint(config: ExperimentConfig, is_here: bool = True) -> None:
    """Check that ranks can find what the experiment runs.

    Args:
        is_here: whether the ranks are on this machine. Others may have other packages.

    Raises:
        ConfigError: the module, class or script is missing, or is no Python.
    """
    entrypoint, folder = config.entrypoint, str(config.code)
    name, _, attributes = entrypoint.partition(":")
    if (command := command_of(entrypoint)) is not None:
        name = command.target
        if not command.is_module:
            if not os.path.isfile(os.path.join(folder, name)):
                raise ConfigError(no_such_script(entrypoint, name, folder))
            return
    given = config.rank_variables.get("PYTHONPATH", "")
    search: Sequence[str] | None = [folder, *filter(None, given.split(os.pathsep))]
    module, parts = ast.parse(""), name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:end]), search)
        if spec is None:
            if is_here and not _makes_names(module):
                raise ConfigError(no_such_module(entrypoint, name, folder))
            return
        module, search = _parsed(spec, entrypoint), spec.submodule_search_locations
    wanted = attributes.partition(".")[0]
    if command is None and wanted not in _bound(module) and not _makes_names(module):
        classes = [node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        near = difflib.get_close_matches(wanted, classes, n=1)
        near = near or [each for each in classes if each.endswith("Trial")]
        hint = f'; did you mean "{near[0]}"?' if near else f" (in {spec.origin})" if spec else ""
        raise ConfigError(f'entrypoint "{entrypoint}": module {name} has no "{wanted}"{hint}')


def no_such_module(entrypoint: str, name: str, folder: str) -> str:
    """The error of a module that is missing, with those that are there."""
    there = [file.removesuffix(".py") for file in _python_files(folder)]
    near = difflib.get_close_matches(name.removesuffix(".py"), there, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return (
        f'entrypoint "{entrypoint}": there is no module "{name}" in {folder} '
        f"(modules there: {', '.join(there) or 'none'}){hint}"
    )


def no_such_script(entrypoint: str, path: str, folder: str) -> str:
    """The error of a script that is missing, with those that are there."""
    there = ", ".join(_python_files(folder)) or "none"
    return (
        f'entrypoint "{entrypoint}": there is no script {path} in {folder} (scripts there: {there})'
    )


def _python_files(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".py"))


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is; imports nothing. None: nowhere, or the one before it is no package."""
    PathFinder.invalidate_caches()
    found = None if search is None else PathFinder.find_spec(name, search)
    if found is None and "." not in name:
        with suppress(ValueError):  # this process has a module of that name without a place
            return find_spec(name)
    return found


def _parsed(spec: ModuleSpec, entrypoint: str) -> ast.Module:
    """A module's text.

    Raises:
        ConfigError: it is no Python; says the line.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ast.parse("") if spec.submodule_search_locations else _UNKNOWN
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (SyntaxError, ValueError) as error:
        where = f"{spec.origin}, line {getattr(error, 'lineno', None) or '?'}"
        what = getattr(error, "msg", error)
        raise ConfigError(f'entrypoint "{entrypoint}": {where}: {what}') from None
    except OSError:
        return _UNKNOWN


def _bound(module: ast.Module) -> set[str]:
    """Every name that a statement of a module binds, wherever the statement is."""
    bound: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def _makes_names(module: ast.Module) -> bool:
    """Whether a module may make names, or modules, that its text does not show."""
    return any(
        (isinstance(node, ast.alias) and node.name == "*")
        or (isinstance(node, ast.Name) and node.id in _MAKES_NAMES)
        or (isinstance(node, ast.FunctionDef) and node.name in _MAKES_NAMES)
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules")
        for node in ast.walk(module)
    )
