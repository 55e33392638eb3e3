"""Each stage of a run as a Prefect task: its name on the timeline, and its retries.

A stage, its name and what is special about it are declared in `trial_core/driver/stages`. Only what
Prefect needs is here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.assets import Asset, AssetProperties
from prefect.cache_policies import NO_CACHE
from prefect.context import AssetContext, FlowRunContext
from pydantic import ValidationError

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage.credentials import without_credentials
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.callbacks import callbacks
from trial_core.driver.stages.declared_stage import DeclaredStage
from trialflow.tasks.retrying import TRANSFER

HOOKS_OF_EACH_WORKLOAD = frozenset((
    "on_training_workload_end", "on_checkpoint_write_end", "on_checkpoint_end",
    "on_checkpoint_upload_end",
))  # fmt: skip
"""They are called without a task, which would crowd the timeline."""

_URL = re.compile(r"[a-z0-9]+://")

P = ParamSpec("P")
R = TypeVar("R")


def with_asset(
    upload: Callable[[Launch, StagedCheckpoint], Manifest],
) -> Callable[[Launch, StagedCheckpoint], Manifest]:
    """An upload that also materializes an asset of Prefect's: the trial's checkpoints, of its data.

    Prefect's own server keeps this as events; the graph of assets is a page of Prefect Cloud. The
    assets are added to the task run: `materialize` would need a task for each trial.
    """

    @wraps(upload)
    def upload_and_describe(launch: Launch, staged: StagedCheckpoint) -> Manifest:
        run, context = launch.run, AssetContext.get()
        folder = layout.trial_folder(run.trial)
        asset = _asset(f"{run.store.url}/{folder}", f"Checkpoints of trial {run.trial}")
        if context is None or asset is None:
            return upload(launch, staged)
        context.downstream_assets.add(asset)
        found = map(_asset, _sources(run))
        context.direct_asset_dependencies.update(each for each in found if each is not None)
        manifest = upload(launch, staged)
        asset.add_metadata({
            "checkpoint": manifest.uuid,
            "config_digest": manifest.config_digest,
            "batches": manifest.progress.batches_trained,
            "files": run.store.files_url(manifest.uuid),
        })  # fmt: skip
        return manifest

    return upload_and_describe


def _sources(run: Run) -> Iterator[str]:
    """The URLs of the sources of a trial's training: a checkpoint, and data."""
    searcher = run.config.searcher
    if searcher.source_checkpoint is not None:
        yield from _urls(searcher.source_checkpoint)
    if searcher.source_checkpoint_uuid is not None:
        yield f"{run.store.url}/{layout.CHECKPOINTS}/{searcher.source_checkpoint_uuid}"
    yield from _urls(run.config.data)


def _urls(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if _URL.match(value):
            yield without_credentials(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _urls(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _urls(each)


def _asset(key: str, name: str | None = None) -> Asset | None:
    """Return an asset; None if Prefect refuses such a key, which has a space or is too long."""
    try:
        if name is None:
            return Asset(key=key)
        return Asset(key=key, properties=AssetProperties(name=name))
    except ValidationError:
        return None


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
