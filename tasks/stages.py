"""Each stage of a run as a Prefect task: its name on the timeline, and its retries.

A stage, its name and what is special about it are declared in `trial_core/driver/stages`. Only what
Prefect needs is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.staging import StagedCheckpoint
from trial_core.driver.run import Launch
from trial_core.driver.stages import Stages
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


def _task_of(declared: DeclaredStage) -> Task[Any, Any]:
    special = SPECIAL.get(declared.name)
    work = declared.work if special is None else special(declared.work)
    options = TRANSFER if declared.is_transfer else {"cache_policy": NO_CACHE}
    shown = f"{declared.name} {declared.detail}".rstrip()
    return task(name=declared.name, task_run_name=shown, **options)(work)


DECLARED: Mapping[str, DeclaredStage] = {
    field.name: field.metadata["stage"] for field in fields(Stages)
}
TASKS: Mapping[str, Task[Any, Any]] = {name: _task_of(stage) for name, stage in DECLARED.items()}
"""The task of each stage, by the name of its field in `Stages`."""


def callbacks(launch: Launch, hook: str, batches_trained: int, arguments: dict[str, Any]) -> None:
    """Call one hook of every callback: as a task, unless that would crowd the timeline."""
    is_shown = hook not in HOOKS_OF_EACH_WORKLOAD
    call = TASKS["callbacks"] if is_shown else DECLARED["callbacks"].work
    call(launch, hook, batches_trained, arguments)


_executed: dict[str, Any] = {
    name: TASKS[name].submit if stage.is_parallel else TASKS[name]
    for name, stage in DECLARED.items()
}
STAGES = Stages(**{**_executed, "callbacks": callbacks})
"""The stages of a run as Prefect tasks."""
