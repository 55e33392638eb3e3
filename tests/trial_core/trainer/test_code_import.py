"""Modules of a checkpoint's code, beside modules of the same names in this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trial_core.trainer.load_trial import importing_from


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    """Modules and search path are as before after each test."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def code(folder: Path, **modules: str) -> Path:
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_two_versions_of_one_module(tmp_path: Path) -> None:
    """Each block imports its own; what was imported first is there afterwards."""
    first = code(tmp_path / "a", shared="VERSION = 1", only_a="")
    second = code(tmp_path / "b", shared="VERSION = 2\nimport only_b", only_b="VALUE = 3")
    with importing_from(first):
        assert importlib.import_module("shared").VERSION == 1
        assert Path.cwd() == first
    with importing_from(second):
        assert importlib.import_module("shared").VERSION == 2
    assert importlib.import_module("shared").VERSION == 1
    assert importlib.import_module("only_b").VALUE == 3


def test_two_versions_of_one_package_are_not_mixed(tmp_path: Path) -> None:
    """A module that only the second version has does not stay below the first."""
    first, second = code(tmp_path / "a"), code(tmp_path / "b")
    code(first / "parts", __init__="", both="VERSION = 1")
    code(second / "parts", __init__="", both="VERSION = 2", only_second="")
    with importing_from(first):
        before = importlib.import_module("parts.both")
    with importing_from(second):
        importlib.import_module("parts.only_second")
        assert importlib.import_module("parts.both").VERSION == 2
    assert sys.modules["parts.both"] is before
    assert "parts.only_second" not in sys.modules


def test_what_is_imported_later_is_found_last(tmp_path: Path) -> None:
    """The folder stays at the end of the search path, and shadows nothing of this process.

    Also if the code itself has put the folder first.
    """
    folder = code(tmp_path / "a", imported_later="VALUE = 7")
    with importing_from(folder):
        sys.path.insert(0, str(folder))
    assert sys.path[-1] == str(folder)
    assert str(folder) not in sys.path[:-1]
    assert importlib.import_module("imported_later").VALUE == 7


def test_installed_packages_and_pythons_own_are_not_imported_again(tmp_path: Path) -> None:
    """Folders of data may have their names."""
    folder = code(tmp_path / "a", model="import json, pytest, trial_core")
    for name in ("json", "pytest", "trial_core"):
        (folder / name).mkdir()
    before = {name: sys.modules[name] for name in ("json", "pytest", "trial_core")}
    with importing_from(folder):
        model = importlib.import_module("model")
    assert {name: getattr(model, name) for name in before} == before


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither modules, nor the search path, nor the current folder."""
    folder = code(tmp_path / "a", broken="import half\nraise KeyError('x')", half="")
    place, path = os.getcwd(), list(sys.path)
    with pytest.raises(KeyError), importing_from(folder):
        importlib.import_module("broken")
    assert (os.getcwd(), sys.path) == (place, path)
    assert {"broken", "half"}.isdisjoint(sys.modules)
