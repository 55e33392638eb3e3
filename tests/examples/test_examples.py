"""Every example that is a folder to copy runs as its YAML says, for a few batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slots import Driven, drive
from trial_core.config import load_config
from trial_core.slots.group import SlotGroup

pytest.importorskip("sklearn", reason="these examples read scikit-learn's data sets")

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slots


def run(name: str, folder: Path, batches: int) -> Driven:
    """An example's YAML with another length, and with its checkpoints below `folder`."""
    config = load_config(
        EXAMPLES / name / "experiment.yaml",
        [
            f"searcher.max_length={{batches: {batches}}}",
            f"checkpoint_storage=file://{folder}/checkpoints",
            "scheduling_unit=20",
            "min_validation_period={batches: 20}",
            "checkpoint_policy=none",
        ],
    )
    with SlotGroup(int(config.resources.slots_per_trial), working_dir=config.code) as slots:
        return drive(slots, config, folder)


@pytest.mark.parametrize(
    ("name", "batches", "metric", "direction"),
    [
        ("gan", 300, "nearest_distance", -1),
        ("pipeline", 60, "loss", -1),
        ("roc_auc", 60, "roc_auc", 1),
    ],
)
def test_an_example_learns(
    tmp_path: Path, name: str, batches: int, metric: str, direction: int
) -> None:
    """It trains, validates and saves, and its searcher's metric gets better."""
    driven = run(name, tmp_path, batches)
    first, last = driven.validation[0], driven.validation[-1]
    assert (last[metric] - first[metric]) * direction > 0
    assert driven.stages[-1] == f"checkpoint @{batches}"
    if name == "roc_auc":
        assert abs(last["roc_auc"] - last["mean_of_ranks"]) > 1e-6
