"""Each stage of a run as a Prefect task: its name on the timeline, and its retries.

What a stage does is in `trial_core/driver/stages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.driver.run import Launch
from trial_core.driver.script_progress import ScriptProgress
from trial_core.driver.stages import build, checkpoint, script, upload_run_files as files
from trial_core.driver.stages.callbacks import callbacks as call_hook
from trial_core.driver.stages.own_stage import own_stage as call_own_stage
from trial_core.driver.stages.script import RunningScript, WhatHappened
from trial_core.driver.stages.train_workload import train_workload as train
from trial_core.driver.stages.validate import (
    check_metrics as name_metrics,
    validate as run_validation,
)
from trialflow.tasks.checkpoint_asset import begins_asset, describe_asset
from trialflow.tasks.retrying import TRANSFER

HOOKS_OF_EACH_WORKLOAD = frozenset((
    "on_training_workload_end", "on_checkpoint_write_end", "on_checkpoint_end",
    "on_checkpoint_upload_end",
))  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


def _stage(name: str, detail: str = "", **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Makes a task of a stage; `detail` follows its name, with fields of the stage's arguments."""
    shown = f"{name} {detail}".rstrip()
    return task(name=name, task_run_name=shown, **{"cache_policy": NO_CACHE, **options})


build_trial = _stage("build-trial")(build.build_trial)
fetch_checkpoint = _stage(
    "fetch-checkpoint", "@{manifest.progress.batches_trained}", **TRANSFER
)(build.fetch_checkpoint)  # fmt: skip
build_loaders = _stage("build-loaders", "@{point.progress.batches_trained}")(build.build_loaders)
call_hook_as_task = _stage("callbacks", "{hook} @{batches_trained}")(call_hook)
check_metrics = _stage("check-metrics")(name_metrics)
validate = _stage("validate", "@{batches_trained}")(run_validation)
checkpoint_save = _stage("checkpoint-save", "@{progress.batches_trained}")(
    checkpoint.checkpoint_save
)


@_stage("checkpoint-upload", "@{staged.progress.batches_trained}", **TRANSFER)
def checkpoint_upload(launch: Launch, staged: StagedCheckpoint) -> Manifest:
    """Upload what every rank has staged, then commit: an asset of Prefect's is materialized."""
    asset = begins_asset(launch)
    manifest = checkpoint.checkpoint_upload(launch, staged)
    if asset is not None:
        describe_asset(asset, launch, manifest)
    return manifest


checkpoint_prune = _stage("checkpoint-prune", "@{batches_trained}")(checkpoint.checkpoint_prune)
attach_trial = _stage("attach-trial")(build.attach_trial)
upload_run_files = _stage("upload-run-files", "@{batches_trained}", **TRANSFER)(
    files.upload_run_files
)


own_stage = _stage("own-stage", "{stage.run} @{argument[batches_trained]}")(call_own_stage)


def callbacks(launch: Launch, hook: str, batches_trained: int, arguments: dict[str, Any]) -> None:
    """Call one hook of every callback: as a task, unless that would crowd the timeline."""
    call = call_hook if hook in HOOKS_OF_EACH_WORKLOAD else call_hook_as_task
    call(launch, hook, batches_trained, arguments)


@_stage("train-workload", "[{begin}→{until}]")
def train_workload(launch: Launch, begin: int, until: int) -> int:
    """Train from batch `begin` to `until`. Return how many batches are then trained in all."""
    forget_results()  # no later task takes results of earlier workloads
    return train(launch, begin, until)


@_stage("run-script", "[{begin}→]")
def run_script(
    launch: Launch, running: RunningScript, progress: ScriptProgress, begin: int
) -> WhatHappened:
    """Let a script run until it stores a checkpoint, calls `Trainer.fit`, or ends."""
    forget_results()
    return script.run_script(launch, running, progress, begin)


def forget_results() -> None:
    """Make Prefect forget which task has returned which result. Call in the flow's thread.

    Prefect keeps the state of every task result while a flow runs, keyed by the result's address,
    and a set of assets per task run. So memory would grow with every workload, and a result at a
    reused address would get a wrong dependency arrow. Call this where no task takes an earlier
    result any more.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
        context.task_run_assets.clear()
