"""The names that a Determined user's imports become."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trial_core
import trial_core.deepspeed
import trial_core.pytorch


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (trial_core, trial_core.deepspeed, trial_core.pytorch)
        for name in module.__all__
    ],
)
def test_names_resolve(module: object, name: str) -> None:
    """Every exported name is there, and listed by dir()."""
    assert getattr(module, name) is not None
    assert name in dir(module)


@pytest.mark.parametrize("module", [trial_core, trial_core.deepspeed])
def test_unknown_names_are_refused(module: object) -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Estimator'"):
        module.Estimator  # type: ignore[attr-defined]  # noqa: B018


REFERENCE_LINES = """
import trial_core as det; det.pytorch.deepspeed.DeepSpeedTrial; det.pytorch.DataLoader
from trial_core import deepspeed, pytorch; pytorch.MetricReducer; deepspeed.DeepSpeedTrial
from trial_core.pytorch import DataLoader, PyTorchCallback, TorchData, deepspeed
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, ModelParallelUnit
from trial_core.deepspeed import overwrite_deepspeed_config
"""


def test_the_references_imports_with_the_name_changed() -> None:
    """Determined's import lines, changed to ``trial_core``, in an interpreter of their own."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", REFERENCE_LINES], check=True)


def test_the_store_is_had_without_torch() -> None:
    """Looking after checkpoints needs no training machine."""
    look = "import sys, trial_core; trial_core.CheckpointStore; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", look], check=True)
