"""Each stage of a run as a Prefect task: its name on the timeline, and its retries.

A stage, its name and what is special about it are declared in `trial_core/driver/stages`. Only what
Prefect needs is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.staging import StagedCheckpoint
from trial_core.driver.run import Launch
from trial_core.driver.stages.callbacks import callbacks
from trial_core.driver.stages.declared_stage import DeclaredStage
from trialflow.tasks.checkpoint_asset import begins_asset, describe_asset
from trialflow.tasks.retrying import TRANSFER

HOOKS_OF_EACH_WORKLOAD = frozenset((
    "on_training_workload_end", "on_checkpoint_write_end", "on_checkpoint_end",
    "on_checkpoint_upload_end",
))  # fmt: skip
"""They are called without a task, which would crowd the timeline."""

P = ParamSpec("P")
R = TypeVar("R")


def with_asset(
    upload: Callable[[Launch, StagedCheckpoint], Manifest],
) -> Callable[[Launch, StagedCheckpoint], Manifest]:
    """An upload that also materializes an asset of Prefect's."""

    @wraps(upload)
    def upload_and_describe(launch: Launch, staged: StagedCheckpoint) -> Manifest:
        asset = begins_asset(launch)
        manifest = upload(launch, staged)
        if asset is not None:
            describe_asset(asset, launch, manifest)
        return manifest

    return upload_and_describe


def forgetting_results(work: Callable[P, R]) -> Callable[P, R]:
    """A stage that makes Prefect forget which task has returned which result.

    Prefect keeps the state of every task result while a flow runs, keyed by the result's address,
    and a set of assets per task run. So memory would grow with every workload, and a result at a
    reused address would get a wrong dependency arrow. No task after these stages takes a result of
    an earlier one.
    """

    @wraps(work)
    def forget_and_work(*args: P.args, **kwargs: P.kwargs) -> R:
        context = FlowRunContext.get()
        if context is not None:
            context.run_results.clear()
            context.task_run_assets.clear()
        return work(*args, **kwargs)

    return forget_and_work


SPECIAL: Mapping[str, Callable[..., Any]] = {
    "checkpoint-upload": with_asset,
    "train-workload": forgetting_results,
    "run-script": forgetting_results,
}
"""By the name of a stage, how its function differs under Prefect."""


@cache
def task_of(stage: DeclaredStage[..., Any]) -> Task[Any, Any]:
    """The task of a stage."""
    special = SPECIAL.get(stage.name)
    work = stage.work if special is None else special(stage.work)
    options = TRANSFER if stage.is_transfer else {"cache_policy": NO_CACHE}
    shown = f"{stage.name} {stage.detail}".rstrip()
    return task(name=stage.name, task_run_name=shown, **options)(work)


def as_prefect_task(stage: DeclaredStage[..., Any]) -> Callable[..., Any]:
    """How a flow executes a stage, see `Given.execute`."""
    if stage is callbacks:
        return _call_hook
    return task_of(stage).submit if stage.is_parallel else task_of(stage)


def _call_hook(launch: Launch, hook: str, batches_trained: int, arguments: dict[str, Any]) -> None:
    """Call one hook of every callback: as a task, unless that would crowd the timeline."""
    call = callbacks.work if hook in HOOKS_OF_EACH_WORKLOAD else task_of(callbacks)
    call(launch, hook, batches_trained, arguments)
