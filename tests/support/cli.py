"""Runs `trialflow`: as a process, as a shell does, or in the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import yaml

from tests.support.prefect import prepared
from tests.support.slots import TOY
from trialflow.deployments.cli.main import main
from trialflow.flows.server.prefect_settings import environment

ROOT = Path(__file__).parents[2]
TRIALFLOW = (sys.executable, "-m", "trialflow.deployments.cli.main")


class Called(Protocol):
    """`trialflow` or `trialflow_here`."""

    def __call__(
        self, folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


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


def trialflow_here(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like `trialflow`, but in this process, which has imported what takes a command seconds."""
    printed, said = StringIO(), StringIO()
    chosen = {"TRIALFLOW_HOME": str(folder / "home"), **(variables or {})}
    with (
        environment(chosen),
        patch.dict(os.environ),  # the command may set more
        chdir(folder),
        redirect_stdout(printed),
        redirect_stderr(said),
    ):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), said.getvalue())


EITHER_WAY = [trialflow_here, pytest.param(trialflow, marks=pytest.mark.long)]
"""Values of a parameter of the type `Called`."""


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
