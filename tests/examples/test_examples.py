"""Every example that is a folder to copy runs as its YAML says, for a few batches."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.flow import train
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, load_config

pytest.importorskip("sklearn", reason="these examples read scikit-learn's data sets")

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slots


def example(name: str, folder: Path, *changes: str) -> ExperimentConfig:
    """An example's YAML with its checkpoints below `folder`, and with some `changes`."""
    storage = f"checkpoint_storage=file://{folder}/checkpoints"
    return load_config(EXAMPLES / name / "experiment.yaml", [storage, *changes])


@pytest.mark.server
@pytest.mark.parametrize(
    ("name", "batches", "metric"), [("gan", 300, "nearest_distance"), ("pipeline", 60, "loss")]
)
def test_an_example_learns(here: Path, name: str, batches: int, metric: str) -> None:
    """Through the flow: it trains, validates and saves, and its searcher's metric gets better."""
    config = example(
        name, here, f"searcher.max_length={{batches: {batches}}}", "scheduling_unit=20",
        "min_validation_period={batches: 20}", "checkpoint_policy=all",
    )  # fmt: skip
    result = train(config)
    first, *_, last = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    assert first.progress.batches_trained == 20
    assert last.progress.batches_trained == result.batches_trained == batches
    assert last.uuid == result.checkpoint_uuid
    assert last.metrics["validation"] == result.validation_metrics
    assert result.validation_metrics[metric] < first.metrics["validation"][metric]


PATIENCE, PERIOD = 2, 6


@pytest.mark.server
def test_roc_auc_stops_when_its_area_stays_the_same(here: Path) -> None:
    """Through the flow: its callbacks end the run early, save what they have counted, and keep a
    journal on rank 0; and the area of all is no average of the ranks' own areas."""
    config = example(
        "roc_auc", here,
        f"hyperparameters.patience={PATIENCE}", f"min_validation_period={{batches: {PERIOD}}}",
    )  # fmt: skip
    result = train(config)
    manifests = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    # The best so far are saved, and then the one that the stop leads to.
    *best, last = [manifest.progress.batches_trained for manifest in manifests]
    assert len(best) > 1
    assert all(then - before <= PATIENCE * PERIOD for before, then in pairwise(best))
    assert last - best[-1] == PATIENCE * PERIOD
    assert result.stopped_early
    assert result.batches_trained == last

    best_area = manifests[-2].metrics["validation"]["roc_auc"]
    files = here / "checkpoints" / "checkpoints" / result.checkpoint_uuid
    for rank in (0, 1):
        state = torch.load(files / f"trialflow/rank-{rank:05d}.pt", weights_only=False)
        counted = {"best": best_area, "since_best": PATIENCE}
        assert state["callbacks"] == {"patience": counted, "journal": {}}

    journal, other = (
        re.findall(r"INFO trial: (.*)", (Path(result.run_dir, "logs", log)).read_text())
        for log in ("rank-0.log", "rank-1.log")
    )
    metrics = result.validation_metrics
    areas = [line for line in journal if line.startswith("area")]
    assert len(areas) == last // PERIOD
    assert (
        areas[-1] == f"area {metrics['roc_auc']:.4f}, mean of ranks {metrics['mean_of_ranks']:.4f}"
    )
    assert [line for line in journal if line not in areas] == [
        f"checkpoint {manifest.uuid} is safe" for manifest in manifests
    ]
    assert other == []
    assert 1e-4 < abs(metrics["roc_auc"] - metrics["mean_of_ranks"]) < 0.05
