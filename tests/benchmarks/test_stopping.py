"""That the benchmark of stopping runs and ends as promised."""

from __future__ import annotations

import pytest

from tests.benchmarks.outcome import outcome_of


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_the_stopping_benchmark_ends_with_one_line_of_json() -> None:
    """One round with a tiny model on one rank measures every figure that has a target."""
    outcome = outcome_of("stopping --rounds 1 --ranks 1 --model tiny")
    assert outcome["targets"].keys() < outcome["figures"].keys()
    assert outcome["figures"]["own_start_seconds"] > 0
