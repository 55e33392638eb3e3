"""The stall timeout that each stage passes with its request to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import build_loaders, build_trial, fetch_checkpoint
from trial_core.driver.stages.callbacks import callbacks
from trial_core.driver.stages.checkpoint import checkpoint_save
from trial_core.driver.stages.train_workload import train_workload
from trial_core.driver.stages.upload_run_files import upload_run_files
from trial_core.driver.stages.validate import validate
from trial_core.schedule.sequencer import Progress

CHECKPOINT: Any = SimpleNamespace(
    uuid="4f0c21aa", files=[], topology=None, progress=Progress(batches_trained=5)
)
BATCH_STAGES: dict[str, Callable[[Launch], Any]] = {
    "train-workload": lambda launch: train_workload(launch, 0, 5),
    "validate": lambda launch: validate(launch, 5),
}
OTHER_STAGES: dict[str, Callable[[Launch], Any]] = {
    "build-trial": lambda launch: build_trial(launch),
    "fetch-checkpoint": lambda launch: fetch_checkpoint(launch, CHECKPOINT),
    "build-loaders": lambda launch: build_loaders(launch, ResumePoint()),
    "callbacks": lambda launch: callbacks(launch, "on_training_start", 0, {}),
    "checkpoint-save": lambda launch: checkpoint_save(launch, Progress(batches_trained=5)),
    "upload-run-files": lambda launch: upload_run_files(launch, 5),
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
    launch = Launch(Run(toy_config(folder, stopping=stopping), "toy-0a", folder, store))
    launch.slots = SimpleNamespace(request=request)  # type: ignore[assignment]  # no real ranks
    with pytest.raises(_Requested) as requested:
        STAGES[stage](launch)
    return requested.value.args[0].get("stall_seconds")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_stall_timeout(tmp_path: Path, stage: str) -> None:
    """Unless the experiment turns it off. A short one applies to batches only: the other stages
    have at least half an hour."""
    assert requested_limit(stage, tmp_path, 7200.0) == 7200.0
    assert requested_limit(stage, tmp_path, None) is None
    assert requested_limit(stage, tmp_path, 60.0) == (60.0 if stage in BATCH_STAGES else 1800.0)
