"""The flow called from a script, on the temporary server that Prefect starts for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prefect import ROOT, isolated, prepared
from tests.support.slots import toy_config

SCRIPT = """
from trial_core.config import ExperimentConfig
from trialflow.flows.train import train

if __name__ == "__main__":
    result = train(ExperimentConfig.model_validate_json({config!r}))
    print("trained", result.batches_trained)
"""


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_a_script_logs_what_the_run_does_and_no_error(tmp_path: Path) -> None:
    """Events are sent to the temporary server, which no setting names."""
    config = toy_config(tmp_path, 8, resources={"slots_per_trial": 1})
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(config=config.model_dump_json()))
    variables = {key: each for key, each in os.environ.items() if not key.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, script],
        env={
            **variables, **isolated(prepared(tmp_path / "prefect")), "PYTHONPATH": str(ROOT),
            "TRIALFLOW_HOME": str(tmp_path / "home"),
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        },
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert "\ntrained 8\n" in done.stdout
    assert "| INFO    | Task run 'train-workload [0→8]'" in done.stdout
    assert [line for line in done.stdout.splitlines() if "ERROR" in line or "Error" in line] == []
