"""The stages of a run: one function each, which has the ranks of a launch do something.

`Stages` is the set that a run executes: here the functions themselves; a flow gives each of them as
a Prefect task (`flows/train.py`). A failed transfer is tried again, by Prefect or by `retried`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import ParamSpec

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.storage.retrying import retry_storage
from trial_core.checkpoint.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.config.stages_section import StageConfig
from trial_core.driver.run import Launch
from trial_core.driver.script_progress import ScriptProgress
from trial_core.driver.stages import build, callbacks, checkpoint, script, upload_run_files
from trial_core.driver.stages.own_stage import own_stage
from trial_core.driver.stages.script import RunningScript, WhatHappened
from trial_core.driver.stages.train_workload import train_workload
from trial_core.driver.stages.validate import check_metrics, validate
from trial_core.launch.machine.background import in_background
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.units import EpochLength

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A stage that runs beside training. Python's and Prefect's futures are such."""

    def result(self) -> T_co:
        """Wait for the end. Raises the stage's error."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` at the end, in any thread."""


class Running(Generic[T]):
    """A stage that runs beside training, with an event for its end.

    The state of a future of Prefect's would ask the server, over HTTP. The future is kept because
    Prefect complains about one that is dropped before it has ended.
    """

    def __init__(self, pending: Pending[T]) -> None:
        self.pending = pending
        self.ended = threading.Event()
        pending.add_done_callback(lambda _: self.ended.set())


def retried(stage: Callable[P, T]) -> Callable[P, T]:
    """A stage that is repeated after a pause if the storage fails."""

    @wraps(stage)
    def work(*args: P.args, **kwargs: P.kwargs) -> T:
        return retry_storage(lambda: stage(*args, **kwargs))

    return work


def beside(stage: Callable[P, T]) -> Callable[P, Pending[T]]:
    """A stage that runs in a thread. The thread does not keep the process alive."""

    @wraps(stage)
    def start(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return in_background(partial(stage, *args, **kwargs), stage.__name__)

    return start


@dataclass(frozen=True)
class Stages:
    """The stages that a run executes, in about their order."""

    build_trial: Callable[[Launch], None]
    fetch_checkpoint: Callable[[Launch, Manifest, Restore], str | None]
    build_loaders: Callable[[Launch, ResumePoint], EpochLength | None]
    callbacks: Callable[[Launch, str, int, dict[str, Any]], None]
    check_metrics: Callable[[Launch], list[str] | None]
    train_workload: Callable[[Launch, int, int], int]
    validate: Callable[[Launch, int], bool]
    checkpoint_save: Callable[[Launch, Progress], StagedCheckpoint]
    checkpoint_upload: Callable[[Launch, StagedCheckpoint], Pending[Manifest]]
    checkpoint_prune: Callable[[Launch, RetentionPolicy, int], Pending[None]]
    run_script: Callable[[Launch, RunningScript, ScriptProgress, int], WhatHappened]
    attach_trial: Callable[[Launch], None]
    upload_run_files: Callable[[Launch, int], str]
    own_stage: Callable[[Launch, StageConfig, dict[str, Any]], Pending[Any]]


PLAIN_STAGES = Stages(
    build_trial=build.build_trial,
    fetch_checkpoint=retried(build.fetch_checkpoint),
    build_loaders=build.build_loaders,
    callbacks=callbacks.callbacks,
    check_metrics=check_metrics,
    train_workload=train_workload,
    validate=validate,
    checkpoint_save=checkpoint.checkpoint_save,
    checkpoint_upload=beside(retried(checkpoint.checkpoint_upload)),
    checkpoint_prune=beside(checkpoint.checkpoint_prune),
    run_script=script.run_script,
    attach_trial=build.attach_trial,
    upload_run_files=retried(upload_run_files.upload_run_files),
    own_stage=beside(own_stage),
)
"""The stages without Prefect: each is called, and those beside training in a thread."""
