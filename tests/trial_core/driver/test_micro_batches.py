"""A DeepSpeedTrial without memory for its micro-batches gets smaller ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import trialflow, write_experiment
from tests.support.driving import TRIAL, Notices, drive
from tests.support.json_types import check_json
from tests.support.slots import lines, toy_config
from tests.support.tensors import tensors
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import RankFailed, TrialError

pytestmark = pytest.mark.slots


@pytest.fixture
def here(warm_home: Path) -> Path:
    return warm_home


def experiment(
    here: Path, entrypoint: str = "memory_trials:Greedy", **hparams: Any
) -> ExperimentConfig:
    sizes = {"batch_size": 8, "micro_batch_size": 4, "train_samples": 40}
    return toy_config(
        here, 4, entrypoint=entrypoint,
        hyperparameters={"record": str(here), "fits": 2, **sizes, **hparams},
    )  # fmt: skip


def samples_of_batches(here: Path) -> dict[int, set[float]]:
    """The samples of each batch, of both ranks, from what the last launch recorded."""
    found: dict[int, set[float]] = {}
    for rank in (0, 1):
        for batch, _, *indices in lines(here, "samples", rank):
            found.setdefault(batch, set()).update(indices)
    return found


def test_micro_batches_are_halved_and_accumulated(here: Path) -> None:
    """At the cost of no restart. Each batch has the same samples, the manifest the new size."""
    (here / "small").mkdir()
    observer = Notices()
    result = drive(experiment(here, spills_at=2), observer=observer)
    assert result.batches_trained == 4
    (notice,) = observer.notices
    assert "rank 1 has no memory for micro-batches of 4 samples, so they get 2, and 2" in notice
    store = CheckpointStore(f"file://{here}/checkpoints")
    topology = store.open(str(result.checkpoint_uuid)).topology
    assert (topology.micro_batch_samples, topology.batch_samples) == (2, 8)
    halved = samples_of_batches(here)

    drive(experiment(here, micro_batch_size=2, record=str(here / "small")), "toy-0000cafe")
    assert samples_of_batches(here / "small") == halved
    assert {len(samples) for samples in halved.values()} == {8}


@pytest.mark.long
def test_it_ends_as_a_run_that_was_configured_so(here: Path) -> None:
    """The same weights and optimizer states, bit for bit."""
    files = []
    for name, hparams in (("halved", {}), ("small", {"micro_batch_size": 2})):
        (here / name).mkdir()
        config = experiment(here, record=str(here / name), **hparams)
        result = drive(config, f"toy-0000{len(name):04d}")
        files.append(tensors(here / "checkpoints" / "checkpoints" / str(result.checkpoint_uuid)))
    engine = [{k: v for k, v in found.items() if k.startswith("model0")} for found in files]
    assert engine[0].keys() == engine[1].keys()
    assert [name for name in engine[0] if not engine[0][name].equal(engine[1][name])] == []


@pytest.mark.long
def test_a_loader_of_another_size_ends_the_run(here: Path) -> None:
    """It would load the larger micro-batches again."""
    with pytest.raises(TrialError, match="the training loader does not take smaller ones"):
        drive(experiment(here, "memory_trials:OwnSize"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("resources", "hparams"),
    [
        ({"shrink_micro_batches": False}, {}),
        ({}, {"fits": 0}),
    ],
    ids=["switched off", "not even one sample"],
)
def test_otherwise_the_run_fails(
    here: Path, resources: dict[str, Any], hparams: dict[str, Any]
) -> None:
    """With the error of the rank."""
    config = experiment(here, **hparams)
    config = config.model_copy(update={"resources": config.resources.model_copy(update=resources)})
    with pytest.raises(RankFailed, match="raised OutOfMemoryError"):
        drive(config, TRIAL)


@pytest.mark.long
def test_tune_batch_finds_the_largest(here: Path) -> None:
    """It begins with a whole batch of the rank, and keeps nothing."""
    write_experiment(
        here, entrypoint="memory_trials:Greedy", resources={"slots_per_trial": 2},
        hyperparameters={"batch_size": 16, "fits": 2},
    )  # fmt: skip
    done = trialflow(here, "tune-batch", "--json")
    assert done.returncode == 0, done.stderr
    assert check_json(json.loads(done.stdout)) == {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "data_parallel_ranks": 2,
    }  # fmt: skip
    assert not list(here.glob("home/checkpoints/manifests/*/*"))


@pytest.mark.long
def test_tune_batch_refuses_a_pytorch_trial(here: Path) -> None:
    """It says that this is no DeepSpeedTrial, and nothing of its loader."""
    write_experiment(here, entrypoint="pytorch_trials:Small", hyperparameters={"record": str(here)})
    done = trialflow(here, "tune-batch")
    assert done.returncode == 2
    assert "pytorch_trials:Small is no DeepSpeedTrial, so it has no micro-batch" in done.stderr
