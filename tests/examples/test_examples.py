"""Every example runs as its YAML says, for a few batches."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.driving import drive, warm
from tests.support.flow import train
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, load_config
from trial_core.processes.slots.fork_server import ForkServer

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slots


def example(name: str, folder: Path, *changes: str) -> ExperimentConfig:
    """The experiment file `name` with some `changes`, and checkpoints below `folder`."""
    storage = f"checkpoint_storage=file://{folder}/checkpoints"
    return load_config(EXAMPLES / name, [storage, *changes])


@pytest.mark.parametrize(
    ("name", "batches", "period", "metric", "changes"),
    [
        (
            "gpt_stdlib/experiment.yaml", 20, 10, "bits_per_byte",
            [
                "resources.slots_per_trial=2", "hyperparameters.validation_windows=32",
                "hyperparameters.overwrite_deepspeed_args={train_micro_batch_size_per_gpu: 2}",
            ],
        ),
        *(
            pytest.param(f"gan/{it}.yaml", 300, 20, "nearest_distance", [], marks=pytest.mark.long)
            for it in ("experiment", "pytorch")
        ),
        pytest.param("pipeline/experiment.yaml", 60, 20, "loss", [], marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_an_example_learns(
    tmp_path: Path, warm_server: ForkServer, name: str, batches: int, period: int, metric: str,
    changes: list[str],
) -> None:  # fmt: skip
    """It trains, validates and saves, and its searcher metric improves."""
    if not name.startswith("gpt_stdlib"):
        pytest.importorskip("sklearn", reason="this example reads data of scikit-learn")
    config = example(
        name, tmp_path, f"searcher.max_length={{batches: {batches}}}", f"scheduling_unit={period}",
        f"min_validation_period={{batches: {period}}}", "checkpoint_policy=all", *changes,
    )  # fmt: skip
    with warm(warm_server, tmp_path / "home"):
        result = drive(config)
    first, *_, last = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    assert first.progress.batches_trained == period
    assert last.progress.batches_trained == result.batches_trained == batches
    assert last.uuid == result.checkpoint_uuid
    assert last.metrics["validation"] == result.validation_metrics
    assert result.validation_metrics[metric] < first.metrics["validation"][metric]


@pytest.mark.long
@pytest.mark.server
def test_hugging_faces_trainer_learns(here: Path) -> None:
    """Its script has two ranks under ZeRO-2. Its checkpoints are the run's."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    config = example("hf_trainer/experiment.yaml", here)
    # The last of two arguments counts.
    brief = f" --max_steps 20 --eval_steps 10 --save_steps 10 --output_dir {here}/out"
    result = train(config.model_copy(update={"entrypoint": config.entrypoint + brief}))
    first, last = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    assert [each.progress.batches_trained for each in (first, last)] == [10, 20]
    losses = [each.metrics["validation"]["eval_loss"] for each in (first, last)]
    assert losses[1] < losses[0] < 5.6  # log(256) is 5.5


PATIENCE, PERIOD = 2, 6


@pytest.mark.long
@pytest.mark.server
def test_roc_auc_stops_when_its_area_stops_improving(here: Path) -> None:
    """Its callbacks end the run early, save their state, and log on rank 0; the area of all
    patients differs from the mean of the ranks' areas."""
    pytest.importorskip("sklearn", reason="this example reads data of scikit-learn")
    config = example(
        "roc_auc/experiment.yaml", here,
        f"hyperparameters.patience={PATIENCE}", f"min_validation_period={{batches: {PERIOD}}}",
    )  # fmt: skip
    result = train(config)
    manifests = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    # A checkpoint for each new best validation, and one at the stop.
    *best, last = [manifest.progress.batches_trained for manifest in manifests]
    assert len(best) > 1
    assert all(later - earlier <= PATIENCE * PERIOD for earlier, later in pairwise(best))
    assert last - best[-1] == PATIENCE * PERIOD
    assert result.stopped_early
    assert result.batches_trained == last

    best_area = manifests[-2].metrics["validation"]["roc_auc"]
    files = here / "checkpoints" / "checkpoints" / result.checkpoint_uuid
    for rank in (0, 1):
        state = torch.load(files / f"trialflow/rank-{rank:05d}.pt", weights_only=False)
        counted = {"best": best_area, "since_best": PATIENCE}
        assert state["callbacks"] == {"patience": counted, "journal": {}}

    rank_0, rank_1 = (
        re.findall(r"INFO trial: (.*)", (Path(result.run_dir, "logs", log)).read_text())
        for log in ("rank-0.log", "rank-1.log")
    )
    metrics = result.validation_metrics
    areas = [line for line in rank_0 if line.startswith("area")]
    assert len(areas) == last // PERIOD
    assert (
        areas[-1] == f"area {metrics['roc_auc']:.4f}, mean of ranks {metrics['mean_of_ranks']:.4f}"
    )
    assert [line for line in rank_0 if line not in areas] == [
        f"checkpoint {manifest.uuid} is committed" for manifest in manifests
    ]
    assert rank_1 == []
    assert 1e-4 < abs(metrics["roc_auc"] - metrics["mean_of_ranks"]) < 0.05


@pytest.mark.long
@pytest.mark.server
def test_the_core_api_script_learns_and_continues(here: Path) -> None:
    """A second run of the trial starts from its checkpoint, and trains further."""
    pytest.importorskip("sklearn", reason="this example reads data of scikit-learn")
    config = example("core_api/experiment.yaml", here)
    result = train(config)
    assert result.batches_trained == 600
    assert result.validation_metrics["accuracy"] >= 0.97
    further = config.model_copy(update={"entrypoint": "python train.py --steps 700"})
    resumed = train(further, trial=result.trial)
    stored = CheckpointStore(config.checkpoint_storage.url).list(result.trial)
    assert [each.progress.batches_trained for each in stored] == [200, 400, 600, 700]
    assert resumed.batches_trained == 700
