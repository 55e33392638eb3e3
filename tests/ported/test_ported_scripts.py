"""Determined's shapes of script run after `trialflow migrate`, which changes their imports alone.

The scripts of this folder are written as the pages of Determined's tutorials describe them: with
`init` and `Trainer`, or with the Core API.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ported.test_ported_trials import moved
from tests.support.cli import environment_in
from tests.support.driving import drive, warm
from tests.support.flow import train
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import load_config
from trial_core.processes.slots.fork_server import ForkServer

pytestmark = pytest.mark.slots


def run(
    here: Path, name: str, experiment: str, *overrides: str, by: Callable[..., Any] = train
) -> tuple[Any, CheckpointStore]:
    """Train an experiment of a folder; the result and the storage."""
    storage = f"checkpoint_storage=file://{here}/checkpoints"
    folder = here / name if (here / name).exists() else moved(name, here)
    config = load_config(folder / experiment, [storage, *overrides])
    return by(config), CheckpointStore(config.checkpoint_storage.url)


@pytest.mark.long
@pytest.mark.server
def test_a_trainer_script_takes_its_length_from_its_arguments(here: Path) -> None:
    """`mnist_pytorch` on two ranks, which a launcher of Determined's starts in its file."""
    result, store = run(here, "mnist_trainer", "distributed.yaml")
    assert result.batches_trained == 6
    assert result.validation_metrics.keys() == {"validation_loss", "accuracy", "batch"}
    newest = store.newest(result.trial)
    assert newest is not None
    assert newest.progress.batches_trained == 6


@pytest.mark.long
@pytest.mark.server
def test_a_trainer_script_runs_locally(tmp_path: Path) -> None:
    """The same file, started by python: no run has started it, so it is local."""
    folder = moved("mnist_trainer", tmp_path)
    command = [sys.executable, "train.py", "--batches", "3"]
    subprocess.run(command, cwd=folder, env=environment_in(tmp_path), check=True)
    (manifest,) = CheckpointStore(f"file://{tmp_path}/home/checkpoints").list()
    assert manifest.progress.batches_trained == 3


@pytest.mark.long
@pytest.mark.server
def test_a_trainer_script_of_deepspeed_takes_the_searchers_length(here: Path) -> None:
    """`dcgan`: two engines, gradients that the trial accumulates, no `max_length` in `fit`."""
    result, _ = run(here, "dcgan_trainer", "mnist.yaml")
    assert result.batches_trained == 7
    assert result.validation_metrics == {"no_validation_metric": 0}
    assert result.training_metrics.keys() == {"errD", "errG"}


@pytest.mark.long
@pytest.mark.server
@pytest.mark.parametrize(("stage", "batches"), [("0_start", 0), ("1_metrics", 12)])
def test_the_first_stages_of_a_core_api_script(here: Path, stage: str, batches: int) -> None:
    """A loop that knows no trainer, and one that reports."""
    result, _ = run(here, "core_api", f"{stage}.yaml")
    assert result.batches_trained == batches
    assert result.validation_metrics == ({"x": 36} if batches else {})


@pytest.mark.long
@pytest.mark.server
def test_a_core_api_script_continues_and_gives_its_value_to_another_trial(here: Path) -> None:
    """Stages 2 and 3: the trial id in its checkpoint tells the two ways to continue apart."""
    first, _ = run(here, "core_api", "3_hpsearch.yaml")
    assert first.validation_metrics == {"x": 30, "batches": 10}
    source = f"searcher.source_checkpoint_uuid={first.checkpoint_uuid}"
    other, _ = run(here, "core_api", "3_hpsearch.yaml", "hyperparameters.length=5", source)
    assert other.trial != first.trial
    assert other.validation_metrics == {"x": 30 + 15, "batches": 5}


def test_the_ranks_of_a_core_api_script_add_up(tmp_path: Path, warm_server: ForkServer) -> None:
    """Stage 4, with the launcher of torch: the ranks add 3 and 4 in each of 12 batches."""
    with warm(warm_server, tmp_path / "home"):
        result, store = run(tmp_path, "core_api", "4_distributed.yaml", by=drive)
    assert result.batches_trained == 12
    assert result.validation_metrics == {"x": 7 * 12}
    newest = store.newest(result.trial)
    assert newest is not None
    assert newest.progress.batches_trained == 10
