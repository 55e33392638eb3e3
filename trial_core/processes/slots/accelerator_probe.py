"""Tries this machine's accelerators in a process like a rank's, without torch in the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from trial_core.common.text_format import last_line
from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import (
    KIND_VARIABLE,
    NVIDIA,
    PROBE_TIMEOUT_SECONDS,
    TOOL_TIMEOUT_SECONDS,
    Accelerators,
    device_uuids,
    torch_problem,
)

ACCELERATOR_CHECK = (sys.executable, "-m", "trial_core.deepspeed.accelerator_check")


class AcceleratorProblems(NamedTuple):
    """Problems that limit training on accelerators.

    Attributes:
        of_ranks: why ranks cannot use them; None if they can.
        of_operators: why ranks cannot compile DeepSpeed's operators for them; None if they can, or
            if that was not tried.
    """

    of_ranks: str | None
    of_operators: str | None = None


def try_accelerators(
    visible: Accelerators, environment: Mapping[str, str] = os.environ
) -> AcceleratorProblems:
    """Have a process claim the accelerators as ranks do. Takes some seconds."""
    if (problem := torch_problem()) is not None:
        return AcceleratorProblems(problem)
    try:
        done = subprocess.run(
            [*ACCELERATOR_CHECK, str(len(visible.devices))],
            env={**environment, KIND_VARIABLE: visible.kind},
            capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return AcceleratorProblems(str(error))
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) < 2:
        last = last_line(done.stderr) or "without a message"
        return AcceleratorProblems(
            f"a process like a rank's ended with code {done.returncode}: {last}"
        )
    # Libraries may print before.
    return AcceleratorProblems(json.loads(lines[-2]), json.loads(lines[-1]))


def described(visible: Accelerators) -> str:
    """Their number, kind and model: ``2 × cuda (NVIDIA H100 80GB HBM3, driver 570.86.15)``."""
    counted = f"{len(visible.devices)} × {visible.kind}"
    if visible.kind != NVIDIA:
        return counted
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        query.append(f"--id={','.join(device_uuids(visible).values())}")
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, LaunchError):
        return counted
    models = {line.replace(", ", ", driver "): None for line in done.stdout.splitlines()}
    return f"{counted} ({'; '.join(models)})" if models else counted
