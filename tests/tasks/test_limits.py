"""How long the ranks may take over what each stage asks of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.run.observer import Observer
from trial_core.run.sequencer import Progress
from trialflow.tasks.build import build_loaders, build_trial, fetch_checkpoint
from trialflow.tasks.callbacks import callbacks
from trialflow.tasks.checkpoint import checkpoint_save
from trialflow.tasks.run import TrialRun
from trialflow.tasks.run_files import upload_run_files
from trialflow.tasks.train_workload import train_workload
from trialflow.tasks.validate import validate

BATCHES: dict[str, Callable[[TrialRun], Any]] = {
    "train-workload": lambda run: train_workload.fn(run, 0, 5),
    "validate": lambda run: validate.fn(run, 5),
}
CHECKPOINT: Any = SimpleNamespace(
    uuid="4f0c21aa", files=[], topology=None, progress=Progress(batches_trained=5)
)
OTHERS: dict[str, Callable[[TrialRun], Any]] = {
    "build-trial": lambda run: build_trial.fn(run),
    "fetch-checkpoint": lambda run: fetch_checkpoint.fn(run, CHECKPOINT),
    "build-loaders": lambda run: build_loaders.fn(run, ResumePoint()),
    "callbacks": lambda run: callbacks.fn(run, "on_training_start", 0, {}),
    "checkpoint-save": lambda run: checkpoint_save.fn(run, Progress(batches_trained=5)),
    "upload-run-files": lambda run: upload_run_files.fn(run, 5),
}


class _Asked(Exception):
    """The ranks were asked for something."""


def limit(stage: Callable[[TrialRun], Any], folder: Path, stall_timeout: float | None) -> Any:
    """How long ranks may give no sign during a stage, by what the experiment says."""

    def request(*arguments: Any, **limits: Any) -> Any:
        raise _Asked(limits)

    stopping = {"stall_timeout_seconds": stall_timeout}
    store = CheckpointStore(f"file://{folder}")
    run = TrialRun(toy_config(folder, stopping=stopping), "toy-0a", folder, store, Observer())
    run.slots = SimpleNamespace(request=request)  # type: ignore[assignment]  # asked, not driven
    with pytest.raises(_Asked) as asked:
        stage(run)
    return asked.value.args[0].get("stall_seconds")


@pytest.mark.parametrize("stage", [*BATCHES, *OTHERS])
def test_no_stage_hangs_for_ever(tmp_path: Path, stage: str) -> None:
    """Unless the experiment has it so."""
    ask = {**BATCHES, **OTHERS}[stage]
    assert limit(ask, tmp_path, 7200.0) == 7200.0
    assert limit(ask, tmp_path, None) is None


@pytest.mark.parametrize("stage", [*BATCHES, *OTHERS])
def test_who_knows_how_long_batches_take_does_not_hurry_the_rest(
    tmp_path: Path, stage: str
) -> None:
    """A short limit is for batches: builds, callbacks and saves have half an hour at least."""
    ask = {**BATCHES, **OTHERS}[stage]
    assert limit(ask, tmp_path, 60.0) == (60.0 if stage in BATCHES else 1800.0)
