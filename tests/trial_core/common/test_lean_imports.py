"""What importing DeepSpeed costs, where MLflow is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks import ROOT

SCRIPT = """
import sys
import trial_core
if sys.argv[1] == "before":
    import mlflow
import deepspeed
print("mlflow" in sys.modules, deepspeed.autotuning.autotuner.has_mlflow)
import mlflow
print(mlflow.__name__)
"""


@pytest.mark.parametrize(("when", "seen"), [("after", "False False"), ("before", "True True")])
def test_deepspeed_does_not_import_mlflow(when: str, seen: str) -> None:
    """Anything else may, before and afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == [seen, "mlflow"]
