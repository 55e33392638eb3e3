"""The flow `train` runs a script with Hugging Face's Trainer and `DetCallback`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.server]
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")


def hf_config(here: Path, steps: int, slots: int = 1, **hparams: Any) -> Any:
    arguments = (
        f"--output_dir {here}/out --max_steps {steps} --per_device_train_batch_size 1 "
        "--use_cpu True --report_to none --disable_tqdm True --save_steps 3 --logging_steps 2 "
        "--eval_strategy steps --eval_steps 3 --lr_scheduler_type constant"
    )
    return toy_config(
        here, entrypoint=f"python3 hf_script.py {arguments}", searcher={"metric": "eval_loss"},
        hyperparameters={"record": str(here), **hparams}, max_restarts=1,
        resources={"slots_per_trial": slots},
    )  # fmt: skip


def steps_of(here: Path) -> list[int]:
    return [json.loads(line) for line in (here / "steps").read_text().splitlines()]


def saved(here: Path, trial: str) -> dict[int, Manifest]:
    """The trial's checkpoints, by their steps."""
    store = CheckpointStore(f"file://{here}/checkpoints")
    return {each.progress.batches_trained: each for each in store.list(trial)}


def test_a_trainer_reports_stores_and_resumes(here: Path) -> None:
    """Metrics and checkpoints are the run's. It resumes at the step of its last one."""
    first = train(hf_config(here, 4))
    assert first.batches_trained == 4
    assert {"loss", "learning_rate", "batches", "epochs"} <= first.training_metrics.keys()
    assert "eval_loss" in first.validation_metrics
    stored = saved(here, first.trial)
    assert sorted(stored) == [3, 4]  # the last step, too
    names = {entry.path for entry in stored[4].files}
    assert {"metadata.json", "checkpoint-4/model.safetensors", "checkpoint-4/my_data.json"} <= names
    assert stored[3].metrics["validation"]["eval_loss"] == stored[3].progress.best_metric

    (here / "out" / "checkpoint-9").mkdir()  # left by a run that was killed before its upload
    shutil.rmtree(here / "out" / "checkpoint-4")
    second = train(hf_config(here, 6), trial=first.trial)
    assert second.batches_trained == 6
    assert steps_of(here) == [0, 1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_trainer_that_is_killed_resumes(here: Path) -> None:
    """New ranks continue at the step of the last stored checkpoint."""
    result = train(hf_config(here, 6, slots=2, kill_at=4))
    assert (result.batches_trained, result.stopped_early) == (6, False)
    assert steps_of(here) == [0, 1, 2, 3, 4, 3, 4, 5]
    names = {entry.path for entry in saved(here, result.trial)[6].files}
    assert {"checkpoint-6/rng_state_0.pth", "checkpoint-6/rng_state_1.pth"} <= names


@pytest.mark.long
def test_a_trainer_that_is_stopped_saves_its_step(here: Path) -> None:
    """It is not evaluated first, and continues with the next step."""
    config = hf_config(here, 10**6)
    stopping = config.stopping.model_copy(update={"time_budget_seconds": 20.0})
    stopped = train(config.model_copy(update={"stopping": stopping}))
    end = stopped.batches_trained
    assert stopped.stopped_early
    assert max(saved(here, stopped.trial)) == end
    train(hf_config(here, end + 2), trial=stopped.trial)
    assert steps_of(here) == list(range(end + 2))
