"""Imports a trial from the code of a checkpoint, apart from the modules of this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_OWN = frozenset({"__main__", "trial_core", "trialflow"})


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import modules from `folder` during the block; the current folder is `folder`, too.

    Modules of this process with the same names are set aside meanwhile, and are back after the
    block: this process may have other versions of the same code. The others stay imported, and
    modules that the folder's code imports later are found there, after all else.
    """
    names = _top_level_names(folder)
    set_aside = _taken_out(_replaceable(names))
    place, before = str(folder), os.getcwd()
    sys.path.insert(0, place)
    os.chdir(folder)
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        _taken_out(_replaceable(names))
        _remove_from_path(place)
        raise
    else:
        _taken_out({name.partition(".")[0] for name in set_aside})
        _remove_from_path(place)
        sys.path.append(place)
    finally:
        sys.modules.update(set_aside)
        os.chdir(before)


def _top_level_names(folder: Path) -> set[str]:
    return {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}


def _replaceable(names: set[str]) -> set[str]:
    """The names that are neither ours, nor Python's or an installed package's in this process.

    A folder of data may have such a name, and no process can import torch twice.
    """
    return {
        name
        for name in names - _OWN - sys.stdlib_module_names
        if not _is_installed(sys.modules.get(name))
    }


def _is_installed(module: ModuleType | None) -> bool:
    parts = Path(getattr(module, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


def _taken_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove these modules, with all below them, from this process's; return them."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _remove_from_path(place: str) -> None:
    # More than once: an import of the entrypoint puts the current folder first, too.
    while place in sys.path:
        sys.path.remove(place)
