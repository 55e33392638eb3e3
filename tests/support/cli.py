"""Runs `trialflow` as a process, as a shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.prefect import prepared
from tests.support.slots import TOY

ROOT = Path(__file__).parents[2]
TRIALFLOW = (sys.executable, "-m", "trialflow.deployments.cli.main")


def environment_in(folder: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command whose runs are kept in `folder`."""
    prepared(Path(os.environ["PREFECT_HOME"]))
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRIALFLOW_HOME": str(folder / "home"),
        **(variables or {}),
    }


def trialflow(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` and wait for its end."""
    return subprocess.run(
        [*TRIALFLOW, *arguments],
        cwd=folder, env=environment_in(folder, variables),
        text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def write_experiment(folder: Path, **fields: Any) -> Path:
    """Write an experiment file for the toy trial on one slot; `fields` override the defaults."""
    path = folder / "experiment.yaml"
    defaults = {
        "name": "toy",
        "entrypoint": "toy_trial:ToyTrial",
        "code": str(TOY),
        "scheduling_unit": 4,
        "max_restarts": 0,
        "searcher": {"metric": "loss", "max_length": {"batches": 8}},
    }
    path.write_text(yaml.safe_dump({**defaults, **fields}))
    return path
