"""The stall timeout that each stage passes with its request to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.run.observer import Observer
from trial_core.run.sequencer import Progress
from trialflow.tasks.build import build_loaders, build_trial, fetch_checkpoint
from trialflow.tasks.callbacks import callbacks
from trialflow.tasks.checkpoint import checkpoint_save
from trialflow.tasks.train_workload import train_workload
from trialflow.tasks.trial_run import TrialRun
from trialflow.tasks.upload_run_files import upload_run_files
from trialflow.tasks.validate import validate

CHECKPOINT: Any = SimpleNamespace(
    uuid="4f0c21aa", files=[], topology=None, progress=Progress(batches_trained=5)
)
BATCH_STAGES: dict[str, Callable[[TrialRun], Any]] = {
    "train-workload": lambda run: train_workload.fn(run, 0, 5),
    "validate": lambda run: validate.fn(run, 5),
}
OTHER_STAGES: dict[str, Callable[[TrialRun], Any]] = {
    "build-trial": lambda run: build_trial.fn(run),
    "fetch-checkpoint": lambda run: fetch_checkpoint.fn(run, CHECKPOINT),
    "build-loaders": lambda run: build_loaders.fn(run, ResumePoint()),
    "callbacks": lambda run: callbacks.fn(run, "on_training_start", 0, {}),
    "checkpoint-save": lambda run: checkpoint_save.fn(run, Progress(batches_trained=5)),
    "upload-run-files": lambda run: upload_run_files.fn(run, 5),
}
STAGES = {**BATCH_STAGES, **OTHER_STAGES}


class _Requested(Exception):
    """A request was sent to the ranks."""


def requested_limit(stage: str, folder: Path, stall_timeout: float | None) -> Any:
    """The stall timeout of a stage's request, if the experiment's is `stall_timeout`."""

    def request(*arguments: Any, **limits: Any) -> Any:
        raise _Requested(limits)

    stopping = {"stall_timeout_seconds": stall_timeout}
    store = CheckpointStore(f"file://{folder}")
    run = TrialRun(toy_config(folder, stopping=stopping), "toy-0a", folder, store, Observer())
    run.slots = SimpleNamespace(request=request)  # type: ignore[assignment]  # no real ranks
    with disable_run_logger(), pytest.raises(_Requested) as requested:
        STAGES[stage](run)
    return requested.value.args[0].get("stall_seconds")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_stall_timeout(tmp_path: Path, stage: str) -> None:
    """Unless the experiment turns it off. A short one applies to batches only: the other stages
    have at least half an hour."""
    assert requested_limit(stage, tmp_path, 7200.0) == 7200.0
    assert requested_limit(stage, tmp_path, None) is None
    assert requested_limit(stage, tmp_path, 60.0) == (60.0 if stage in BATCH_STAGES else 1800.0)
