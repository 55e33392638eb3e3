"""That the benchmarks of report, telemetry and the driver's memory run and end as promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def outcome(command: str) -> Any:
    """The last line that a benchmark prints."""
    printed = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    return json.loads(printed.splitlines()[-1])


@pytest.mark.long
@pytest.mark.slots
def test_the_report_benchmark_ends_with_one_line_of_json() -> None:
    """A short run says what a watched batch costs, beside one that nobody watches."""
    seen = outcome("benchmarks.report --pairs 1 --workloads 1 --batches 2 --pause 0.1")
    assert seen["targets"] == {"ratio_1_rank": 1.01}
    assert seen["figures"]["batch_ms_1_rank"] > 10
    assert seen["figures"]["ratio_1_rank"] > 0


@pytest.mark.long
@pytest.mark.slots
def test_the_telemetry_benchmark_ends_with_one_line_of_json() -> None:
    """A short run says what a batch costs whose run is exported, and that it was."""
    seen = outcome("benchmarks.telemetry --pairs 1 --workloads 1 --batches 2")
    assert seen["targets"] == {"ratio_1_rank": 1.002}
    assert seen["figures"]["batch_ms_1_rank"] > 10
    assert seen["figures"]["requests"] >= 4


@pytest.mark.long
def test_the_memory_benchmark_ends_with_one_line_of_json() -> None:
    """A short run drives the flow's tasks, checkpoints among them, and looks at this process."""
    seen = outcome("benchmarks.driver_memory --workloads 120 --every 40")
    assert seen["targets"] == {"growth_mib": 10.0}
    assert seen["figures"]["rss_mib_at_120"] > 50
