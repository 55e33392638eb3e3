"""A run whose nodes are those of a real Ray cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import breaking, train
from tests.support.nodes import LOOPBACK
from tests.support.ray import RayCluster
from tests.support.slots import lines, toy_config
from trial_core.errors import LaunchError

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.server]


def on_ray(here: Path, cluster: RayCluster, batches: int, **changes: Any) -> Any:
    """An experiment whose two ranks are on two nodes of the cluster, saved every 4 batches."""
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "engine": "ray", "max_wait_seconds": 120,
        "channel": {"bind": LOOPBACK}, "ray": {"address": cluster.address}, "accelerator": "cpu",
    }  # fmt: skip
    resources.update(changes.pop("resources", {}))
    fields: dict[str, Any] = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}}
    return toy_config(here, batches, resources=resources, **{**fields, **changes})


def test_a_lost_agent_on_ray_is_replaced(here: Path, ray_cluster: RayCluster) -> None:
    """The run goes back to its last checkpoint, and completes."""
    breaks = breaking(here, "lose node", 13, do_rank=1)
    config = on_ray(here, ray_cluster, 16, max_restarts=1, hyperparameters=breaks)
    result = train(config)
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 1)]
    assert seen[:13] == list(range(13))
    assert seen[13:] in (list(range(12, 16)), list(range(8, 16)))
    assert "was lost with its node: " in Path(result.report_path).read_text()


def test_more_slots_than_the_cluster_has(here: Path, ray_cluster: RayCluster) -> None:
    """The run fails at once, and says what each node has."""
    config = on_ray(here, ray_cluster, 16, resources={"slots_per_trial": 64, "slots_per_node": 8})
    with pytest.raises(LaunchError, match="slots"):
        train(config)
