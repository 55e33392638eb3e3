"""The stages of a run: each is one function that has the ranks of a launch do something.

`Stages` declares them, and holds a callable for each: by default the function itself, in a flow a
Prefect task (`tasks/stages.py`). A failed transfer is repeated, by Prefect or by `retried`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.transfer.staging import StagedCheckpoint
from trial_core.config.stages_section import StageConfig
from trial_core.driver.run import Launch
from trial_core.driver.script_reports import ScriptReports
from trial_core.driver.stages import build, callbacks, checkpoint, script, upload_run_files
from trial_core.driver.stages.declared_stage import Pending, declared
from trial_core.driver.stages.own_stage import own_stage
from trial_core.driver.stages.script import RunningScript, WhatHappened
from trial_core.driver.stages.train_workload import train_workload
from trial_core.driver.stages.validate import check_metrics, validate
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.units import EpochLength


@dataclass(frozen=True)
class Stages:
    """The stages of a run, in about their order. The defaults run without Prefect."""

    build_trial: Callable[[Launch], None] = declared(build.build_trial, "build-trial")
    fetch_checkpoint: Callable[[Launch, Manifest, Restore], str | None] = declared(
        build.fetch_checkpoint, "fetch-checkpoint", "@{manifest.progress.batches_trained}",
        is_transfer=True,
    )  # fmt: skip
    build_loaders: Callable[[Launch, ResumePoint], EpochLength | None] = declared(
        build.build_loaders, "build-loaders", "@{point.progress.batches_trained}"
    )
    callbacks: Callable[[Launch, str, int, dict[str, Any]], None] = declared(
        callbacks.callbacks, "callbacks", "{hook} @{batches_trained}"
    )
    check_metrics: Callable[[Launch], list[str] | None] = declared(check_metrics, "check-metrics")
    train_workload: Callable[[Launch, int, int], int] = declared(
        train_workload, "train-workload", "[{begin}→{until}]"
    )
    validate: Callable[[Launch, int], bool] = declared(validate, "validate", "@{batches_trained}")
    checkpoint_save: Callable[[Launch, Progress], StagedCheckpoint] = declared(
        checkpoint.checkpoint_save, "checkpoint-save", "@{progress.batches_trained}"
    )
    checkpoint_upload: Callable[[Launch, StagedCheckpoint], Pending[Manifest]] = declared(
        checkpoint.checkpoint_upload, "checkpoint-upload", "@{staged.progress.batches_trained}",
        is_transfer=True, is_parallel=True,
    )  # fmt: skip
    checkpoint_prune: Callable[[Launch, RetentionPolicy, int], Pending[None]] = declared(
        checkpoint.checkpoint_prune, "checkpoint-prune", "@{batches_trained}", is_parallel=True
    )
    run_script: Callable[[Launch, RunningScript, ScriptReports, int], WhatHappened] = declared(
        script.run_script, "run-script", "[{begin}→]"
    )
    attach_trial: Callable[[Launch], None] = declared(build.attach_trial, "attach-trial")
    upload_run_files: Callable[[Launch, int], str] = declared(
        upload_run_files.upload_run_files, "upload-run-files", "@{batches_trained}",
        is_transfer=True,
    )  # fmt: skip
    own_stage: Callable[[Launch, StageConfig, dict[str, Any]], Pending[Any]] = declared(
        own_stage, "own-stage", "{stage.run} @{argument[batches_trained]}", is_parallel=True
    )

    def call_hook(self, launch: Launch, hook: str, batches_trained: int, **arguments: Any) -> None:
        """Call one hook of every callback, if any callback of the trial overrides it."""
        if hook in launch.answers.hooks:
            self.callbacks(launch, hook, batches_trained, arguments)


PLAIN_STAGES = Stages()
"""The stages as they run without Prefect."""
