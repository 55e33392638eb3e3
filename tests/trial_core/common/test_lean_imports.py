"""What importing DeepSpeed costs, where MLflow is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks import ROOT

SCRIPT = """
import importlib.util, sys
import trial_core
if sys.argv[1] == "before":
    import mlflow
import deepspeed
print("mlflow" in sys.modules, deepspeed.autotuning.autotuner.has_mlflow)
print(importlib.util.find_spec("mlflow") is not None)
"""


@pytest.mark.parametrize(
    ("when", "seen"),
    [("after", "False False"), pytest.param("before", "True True", marks=pytest.mark.long)],
)
def test_deepspeed_does_not_import_mlflow(when: str, seen: str) -> None:
    """Anything else may, before and afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == [seen, "True"]
