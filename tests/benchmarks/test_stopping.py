"""That the benchmark of stopping runs and ends as promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_the_stopping_benchmark_ends_with_one_line_of_json() -> None:
    """One round with a tiny model on one rank measures every figure that has a target."""
    command = "-m benchmarks.stopping --rounds 1 --ranks 1 --model tiny"
    printed = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    outcome = json.loads(printed.splitlines()[-1])
    assert outcome.keys() == {"figures", "targets", "holds"}
    assert outcome["targets"].keys() < outcome["figures"].keys()
    assert outcome["figures"]["own_start_seconds"] > 0
