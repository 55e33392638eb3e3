"""Each stage of a run as a Prefect task: its name on the timeline, and its retries.

What a stage does is in `trial_core/driver/stages`.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.driver.run import Launch
from trial_core.driver.stages import build, checkpoint, script
from trial_core.driver.stages.script import RunningScript, WhatHappened
from trial_core.driver.stages.train_workload import train_workload as train
from trial_core.driver.stages.upload_run_files import upload_run_files as upload_files
from trial_core.driver.stages.validate import (
    check_metrics as name_metrics,
    validate as run_validation,
)
from trial_core.retention.policy import RetentionPolicy
from trial_core.run.script_progress import ScriptProgress
from trial_core.run.sequencer import Progress
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.units import EpochLength
from trialflow.tasks.retrying import TRANSFER


@task(name="build-trial", task_run_name="build-trial", cache_policy=NO_CACHE)
def build_trial(launch: Launch) -> None:
    """Construct the user's trial, with its models and optimizers, on every rank."""
    build.build_trial(launch)


@task(
    name="fetch-checkpoint",
    task_run_name="fetch-checkpoint @{manifest.progress.batches_trained}",
    **TRANSFER,
)
def fetch_checkpoint(
    launch: Launch, manifest: Manifest, restore: Restore = "everything"
) -> str | None:
    """Fetch and verify a checkpoint. Return what is damaged; None if it is intact."""
    return build.fetch_checkpoint(launch, manifest, restore)


@task(
    name="build-loaders",
    task_run_name="build-loaders @{point.progress.batches_trained}",
    cache_policy=NO_CACHE,
)
def build_loaders(launch: Launch, point: ResumePoint) -> EpochLength | None:
    """Build the loaders and restore the checkpoint. Return the length of an epoch."""
    return build.build_loaders(launch, point)


@task(name="check-metrics", task_run_name="check-metrics", cache_policy=NO_CACHE)
def check_metrics(launch: Launch) -> list[str] | None:
    """The names of the validation metrics; None if one batch does not tell them."""
    return name_metrics(launch)


@task(
    name="train-workload", task_run_name="train-workload [{begin}→{until}]", cache_policy=NO_CACHE
)
def train_workload(launch: Launch, begin: int, until: int) -> int:
    """Train from batch `begin` to `until`. Return how many batches are then trained in all."""
    forget_results()  # no later task takes results of earlier workloads
    return train(launch, begin, until)


@task(name="validate", task_run_name="validate @{batches_trained}", cache_policy=NO_CACHE)
def validate(launch: Launch, batches_trained: int) -> bool:
    """Validate on the whole set. Return False if a stop request ended it early."""
    return run_validation(launch, batches_trained)


@task(
    name="checkpoint-save",
    task_run_name="checkpoint-save @{progress.batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_save(launch: Launch, progress: Progress) -> StagedCheckpoint:
    """Stage a checkpoint on every rank. Training may continue when this returns."""
    return checkpoint.checkpoint_save(launch, progress)


@task(
    name="checkpoint-upload",
    task_run_name="checkpoint-upload @{staged.progress.batches_trained}",
    **TRANSFER,
)
def checkpoint_upload(launch: Launch, staged: StagedCheckpoint) -> Manifest:
    """Upload what every rank has staged, then commit. Runs beside training."""
    return checkpoint.checkpoint_upload(launch, staged)


@task(
    name="checkpoint-prune",
    task_run_name="checkpoint-prune @{batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_prune(launch: Launch, policy: RetentionPolicy, batches_trained: int) -> None:
    """Delete the checkpoints that the experiment does not keep. Runs beside training."""
    checkpoint.checkpoint_prune(launch, policy, batches_trained)


@task(name="run-script", task_run_name="run-script [{begin}→]", cache_policy=NO_CACHE)
def run_script(
    launch: Launch, running: RunningScript, progress: ScriptProgress, begin: int
) -> WhatHappened:
    """Let a script run until it stores a checkpoint, calls `Trainer.fit`, or ends."""
    forget_results()
    return script.run_script(launch, running, progress, begin)


@task(name="attach-trial", task_run_name="attach-trial", cache_policy=NO_CACHE)
def attach_trial(launch: Launch) -> None:
    """Take over the trial of a script that has called `Trainer.fit`."""
    build.attach_trial(launch)


@task(name="upload-run-files", task_run_name="upload-run-files @{batches_trained}", **TRANSFER)
def upload_run_files(launch: Launch, batches_trained: int) -> str:
    """Upload the files that no checkpoint upload has taken along; the URL of all of them."""
    return upload_files(launch, batches_trained)


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
