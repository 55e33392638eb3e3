"""`Context`: what `trial_core.init` gives a Core API script."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trial_core.cluster_info import ScriptInfo
from trial_core.core_api.checkpoints import CheckpointContext
from trial_core.core_api.metrics import checked_steps, plain_metrics
from trial_core.core_api.script_host import ScriptHost
from trial_core.core_api.searcher import SearcherContext
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.messages import MetricsKind
from trial_core.unknown_names import unknown_name


class PreemptMode(enum.Enum):
    """Which ranks ask `PreemptContext.should_preempt`. No mode makes ranks wait for each other.

    Attributes:
        WorkersAskChief: every rank, equally often.
        ChiefOnly: rank 0 alone, which tells the others.
        WorkersAskMaster: any rank.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class TrainContext:
    """Reports metrics to the run. Follows Determined's class."""

    def __init__(self, host: ScriptHost) -> None:
        self._host = host

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Report training metrics. Call it on rank 0 alone.

        Args:
            steps_completed: steps (batches, as a rule) trained since the start of the trial.
            metrics: numbers, tensors or arrays by name; reduced over the ranks by the script.
            batch_metrics: accepted as in the reference, but not kept.

        Raises:
            TrialError: an argument is invalid, or another rank than 0 calls this.
        """
        self._report("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics. Call it on rank 0 alone, before the step's checkpoint.

        Args:
            steps_completed: steps trained since the start of the trial.
            metrics: numbers, tensors or arrays by name. ``searcher.metric`` should be among them:
                it decides which checkpoint is best.

        Raises:
            TrialError: an argument is invalid, or another rank than 0 calls this.
        """
        self._report("validation", steps_completed, metrics)

    def set_status(self, status: str) -> None:
        """Tell people what the script is doing. Ranks other than 0 are not heard."""
        if self._host.distributed.get_rank() == 0:
            self._host.set_status(str(status))

    def get_tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard; its files are stored with the run."""
        return self._host.tensorboard_path()

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name("TrainContext", name, dir(type(self)))

    def _report(self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        source = f"train.report_{kind}_metrics"
        rank = self._host.distributed.get_rank()
        if rank != 0:
            raise TrialError(
                f"{source} was called on rank {rank}: reduce the metrics over the ranks, and "
                "report them on rank 0 alone (if context.distributed.rank == 0)"
            )
        steps = checked_steps(steps_completed, source)
        self._host.report(kind, steps, plain_metrics(metrics, source))


class PreemptContext:
    """Tells whether to save and end. Follows Determined's class."""

    def __init__(self, host: ScriptHost, mode: PreemptMode) -> None:
        self._host = host
        self._refuses = mode is PreemptMode.ChiefOnly and host.distributed.get_rank() != 0
        if self._refuses:
            host.expect_stops()

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether the run was asked to stop: store a checkpoint, then end the script.

        Ranks that ask equally often get True at the same call, without a collective: asking once
        a step costs nothing. Ranks that never ask cannot stop in time, and are killed.

        Args:
            auto_ack: accepted as in the reference; there is nothing to acknowledge.

        Raises:
            TrialError: with `PreemptMode.ChiefOnly`, another rank than 0 calls this.
        """
        if self._refuses:
            raise TrialError(
                "preempt.should_preempt was called on rank "
                f"{self._host.distributed.get_rank()} with PreemptMode.ChiefOnly: call it on rank "
                "0 alone and broadcast its answer, or enter init without this mode"
            )
        return self._host.should_preempt()

    def acknowledge_preemption_signal(self) -> None:
        """Does nothing: a script that was told to stop, and ends, counts as stopped."""


class Context:
    """What a Core API script asks and tells its run. Follows ``determined.core.Context``.

    Attributes:
        train: reports metrics.
        checkpoint: stores and restores checkpoints.
        preempt: tells whether to save and end.
        searcher: says how long to train.
        distributed: which rank this is, and collectives of small objects.
        info: the trial, its hyperparameters, and the checkpoint to resume from.
    """

    def __init__(
        self, host: ScriptHost, preempt_mode: PreemptMode = PreemptMode.WorkersAskChief
    ) -> None:
        self.train = TrainContext(host)
        self.checkpoint = CheckpointContext(host)
        self.preempt = PreemptContext(host, PreemptMode(preempt_mode))
        self.searcher = SearcherContext(host)
        self.distributed: DistributedContext = host.distributed
        self.info: ScriptInfo = host.info

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name("Context", name, [*vars(self)])
