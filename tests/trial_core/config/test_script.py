"""What a script's experiment is made of."""

from __future__ import annotations

import sys
import sysconfig
import types
from pathlib import Path

import pytest

from trial_core.config.script import has_code_folder


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/ana/train.py", True),
        (f"{sysconfig.get_path('scripts')}/train", False),
        (f"{sysconfig.get_path('scripts', sysconfig.get_preferred_scheme('user'))}/train", False),
        (f"{sysconfig.get_path('purelib')}/package/train.py", False),
        (None, False),
    ],
)
def test_an_installed_program_has_no_code_folder(
    monkeypatch: pytest.MonkeyPatch, file: str | None, is_own: bool
) -> None:
    """The folder of a command or a package holds others' files, too; a notebook has none."""
    module = types.ModuleType("started")
    if file is not None:
        module.__file__ = str(Path(file))
    monkeypatch.setitem(sys.modules, "started", module)
    assert has_code_folder("started") is is_own
