"""The package's public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trial_core.pytorch
from trial_core.pytorch.data import samplers


def test_importing_the_package_is_cheap() -> None:
    """Importing the package, and the names that need no torch, imports neither torch nor numpy."""
    script = (
        "import sys, trial_core.pytorch as p\n"
        "assert p.Batch(3).value == 3\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported too much'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", trial_core.pytorch.__all__)
def test_names_resolve(name: str) -> None:
    """Every exported name is there, and listed by dir()."""
    assert getattr(trial_core.pytorch, name) is not None
    assert name in dir(trial_core.pytorch)


@pytest.mark.parametrize("name", samplers.__all__)
def test_sampler_names_resolve(name: str) -> None:
    """Every sampler of the reference is there."""
    assert getattr(samplers, name) is not None


def test_unknown_names_are_refused() -> None:
    """A name that does not exist is an AttributeError, as with any module."""
    with pytest.raises(AttributeError, match="has no attribute 'PyTorchLightning'"):
        trial_core.pytorch.PyTorchLightning  # noqa: B018
