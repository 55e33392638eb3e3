"""That the benchmark of the driver's scale runs and ends as promised."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.scale import TARGETS, measure_loss
from tests.benchmarks.outcome import outcome_of
from trial_core.errors import RankFailed


@pytest.mark.long
def test_the_scale_benchmark_ends_with_one_line_of_json() -> None:
    """Four agents of two ranks join, answer and lose one of them: every figure is measured."""
    outcome = outcome_of("scale --agents 4 --slots 2 --requests 3")
    assert outcome["targets"] == TARGETS
    assert (outcome["figures"]["agents"], outcome["figures"]["ranks"]) == (4, 8)
    assert outcome["targets"].keys() < outcome["figures"].keys()
    assert all(value > 0 for value in outcome["figures"].values())


class Victim:
    """Agents that are not there."""

    nodes = ("node-3",)

    def kill(self) -> None:
        """As `AgentProcess.kill`."""


class Slots:
    """A slot group whose requests fail because of a rank on that host."""

    def __init__(self, host: str) -> None:
        self._host = host

    def submit(self, request: object) -> Future[Any]:
        """As `SlotGroup.submit`."""
        failed: Future[Any] = Future()
        failed.set_exception(
            RankFailed(rank=6, host=self._host, during="a test", log_tail="", log_path="")
        )
        return failed


def test_an_error_that_names_another_node_is_not_measured() -> None:
    """However fast it comes."""
    slots: Any = Slots("node-3")
    victim: Any = Victim()
    assert measure_loss(slots, victim) > 0
    slots = Slots("node-1")
    with pytest.raises(RuntimeError, match=r"node-3 was killed, and the driver says: rank 6 on n"):
        measure_loss(slots, victim)
