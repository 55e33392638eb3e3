"""Determined's shapes of trial run after a change of their imports alone.

The trials of this folder are written as the pages of Determined's examples describe them: they
import ``determined``. Each test has `trialflow migrate` change those lines, and trains the result.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.flow import train
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import load_config
from trialflow.deployments.cli.migrate import migrate

PORTED = Path(__file__).parent
pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.long]


def moved(name: str, folder: Path) -> Path:
    """A copy of a trial, moved by the command."""
    target = folder / name
    shutil.copytree(PORTED / name, target)
    migrate(target)
    return target


@pytest.mark.parametrize(
    ("name", "batches", "metrics"),
    [
        ("mnist", 9, {"validation_loss", "accuracy"}),
        ("cifar10", 8, {"validation_error", "correct"}),
        ("dcgan", 9, {"loss"}),
        ("gpt_neox", 7, {"lm_loss", "lm_loss_ppl"}),
    ],
)
def test_a_trial_of_determined_runs_with_other_imports(
    here: Path, name: str, batches: int, metrics: set[str]
) -> None:
    """On two ranks; it reports all of its validation metrics, and saves."""
    storage = f"checkpoint_storage=file://{here}/checkpoints"
    config = load_config(moved(name, here) / "const.yaml", [storage])
    result = train(config)
    assert result.batches_trained == batches
    assert result.validation_metrics.keys() == metrics
    newest = CheckpointStore(config.checkpoint_storage.url).newest(result.trial)
    assert newest is not None
    assert newest.progress.batches_trained == batches
