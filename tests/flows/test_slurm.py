"""A run in an allocation of a real Slurm on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import breaking, train
from tests.support.nodes import LOOPBACK
from tests.support.slots import lines, toy_config
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.server]


def test_a_lost_agent_in_an_allocation_is_replaced(
    here: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``engine: auto`` uses the allocation, whose third node takes the lost one's place."""
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "max_wait_seconds": 120, "accelerator": "cpu",
        "channel": {"bind": LOOPBACK},
    }  # fmt: skip
    config = toy_config(
        here, 16, resources=resources, scheduling_unit=4, min_checkpoint_period={"batches": 4},
        max_restarts=1, hyperparameters=breaking(here, "lose node", 13, do_rank=1),
    )  # fmt: skip
    with slurm.allocation("--nodes=3", "--exclusive") as environment:
        changed: dict[str, Any] = {k: v for k, v in environment.items() if k.startswith("SLURM")}
        for name, value in changed.items():
            monkeypatch.setenv(name, value)
        result = train(config)
        assert slurm.steps(environment) == []
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 1)]
    assert seen[:13] == list(range(13))
    assert seen[13:] in (list(range(12, 16)), list(range(8, 16)))
    assert "was lost with its node: " in Path(result.report_path).read_text()
