"""Importing `trial_core.pytorch`; `test_exports` holds its names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trial_core.pytorch


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    """Nor does using a name that needs neither."""
    script = (
        "import sys, trial_core.pytorch as p\n"
        "assert p.Batch(3).value == 3\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported too much'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_names_are_refused() -> None:
    """With an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'PyTorchLightning'"):
        trial_core.pytorch.PyTorchLightning  # noqa: B018
