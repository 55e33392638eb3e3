"""The flow `train` runs a script with Hugging Face's Trainer and `DetCallback`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.slots import toy_config
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


def test_a_trainer_reports_stores_and_resumes(here: Path) -> None:
    """Metrics and checkpoints are the run's. It resumes at the step of its last one."""
    first = train(hf_config(here, 4))
    assert first.batches_trained == 4
    assert {"loss", "learning_rate", "batches", "epochs"} <= first.training_metrics.keys()
    assert "eval_loss" in first.validation_metrics
    store = CheckpointStore(f"file://{here}/checkpoints")
    saved = {each.progress.batches_trained: each for each in store.list(first.trial)}
    assert sorted(saved) == [3, 4]  # the last step, too
    names = {entry.path for entry in saved[4].files}
    assert {"metadata.json", "checkpoint-4/model.safetensors", "checkpoint-4/my_data.json"} <= names
    assert saved[4].metrics["validation"]["eval_loss"] == saved[4].progress.best_metric

    (here / "out" / "checkpoint-9").mkdir()  # left by a run that was killed before its upload
    shutil.rmtree(here / "out" / "checkpoint-4")
    second = train(hf_config(here, 6), trial=first.trial)
    assert second.batches_trained == 6
    assert steps_of(here) == [0, 1, 2, 3, 4, 5]
