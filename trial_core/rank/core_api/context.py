"""`Context`: the object that `trial_core.init` gives a Core API script."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_core.cluster_info import ClusterInfo
from trial_core.common.unknown_names import SaysWhatToUse
from trial_core.errors import TrialError, TrialValueError
from trial_core.messages import MetricsKind, check_integer
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.checkpoints import CheckpointContext, checked_steps
from trial_core.rank.core_api.script_host import ScriptHost
from trial_core.rank.core_api.searcher import SearcherContext
from trial_core.schedule.work import NumberType, said_work

logger = logging.getLogger(__name__)

_LEVELS = {"debug": logging.DEBUG, "warn": logging.WARNING, "error": logging.ERROR}


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


class TensorboardMode(enum.Enum):
    """Files for TensorBoard are stored always, or once `upload_tensorboard_files` is called."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class EarlyExitReason(enum.Enum):
    """Why a script ends early, for `TrainContext.report_early_exit`."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TrainContext(SaysWhatToUse):
    """Reports metrics to the run. Follows Determined's class."""

    def __init__(self, host: ScriptHost) -> None:
        self._host = host

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Report training metrics. Call it on one rank: any, and not always the same.

        On rank 0 it does not wait. On another rank it returns when the driver has the report, so
        what the ranks do after a barrier comes after it. Equal reports of several ranks for one
        step count once, with a warning. Different ones end the run with an error.

        Args:
            steps_completed: steps (batches, as a rule) trained since the start of the trial.
            metrics: numbers, tensors or arrays by name; reduced over the ranks by the script.
            batch_metrics: accepted as in Determined, but not kept.

        Raises:
            TrialError: an argument is invalid.
        """
        self._report("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics, on one rank, as `report_training_metrics`.

        Report them before the step's checkpoint is stored. If rank 0 stores it alone, and another
        rank reports, a barrier between the two is needed; with ``shard=True`` it is not.

        Args:
            steps_completed: steps trained since the start of the trial.
            metrics: numbers, tensors or arrays by name. ``searcher.metric`` should be among them:
                it decides which checkpoint is best.

        Raises:
            TrialError: an argument is invalid.
        """
        self._report("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of the group ``"training"`` or ``"validation"``, as the methods above.

        Metrics of any other group are reported as training metrics, under ``group/name``.
        """
        own = "" if group in ("training", "validation") else str(group)
        if own and isinstance(metrics, Mapping):
            metrics = {f"{own}/{name}": value for name, value in metrics.items()}
        kind: MetricsKind = "validation" if group == "validation" else "training"
        self._report(kind, steps_completed, metrics, own)

    def report_progress(self, progress: float) -> None:
        """Show how far the script is, from 0 to 1. Only rank 0's calls count."""
        if not (isinstance(progress, (int, float)) and 0 <= progress <= 1):
            raise TrialValueError(f"train.report_progress: expected 0 to 1, got {progress!r}")
        self.set_status(f"{progress:.0%}")

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Show why the script is about to end. Only rank 0's calls count."""
        self.set_status(f"ends early: {EarlyExitReason(reason).name.lower()}")

    def get_experiment_best_validation(self) -> float | None:
        """The best ``searcher.metric``, or None: of the checkpoint that the script starts from, and
        of this rank's own reports."""
        return self._host.best_validation

    def set_work_per_step(
        self,
        samples: float | None = None,
        tokens: float | None = None,
        flops: float | None = None,
        number_type: NumberType = "bf16",
    ) -> None:
        """Set the work in one step on all ranks, so that the run shows its throughput.

        Call it before the steps, or again if it changes, on the rank that reports training metrics.
        The run then measures from one of its reports to the next, and leaves out the time before
        its reports of validation metrics and for storing a checkpoint.

        Args:
            samples, tokens: the number in one step; None if unknown.
            flops, number_type: see `TrialContext.set_work_per_sample`, but for one step.

        Raises:
            TrialTypeError: an argument is not a number.
            TrialValueError: a value is not positive and finite, or the number type is unknown.
        """
        work = said_work(
            "train.set_work_per_step", number_type, samples=samples, tokens=tokens, flops=flops
        )
        self._host.measure_steps(work)

    def set_status(self, status: str) -> None:
        """Show the script's present activity to people. Only rank 0's calls count."""
        if self._host.distributed.get_rank() == 0:
            self._host.set_status(str(status))

    def get_tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard; its files are stored with the run."""
        return self._host.run.tensorboard.folder()

    def upload_tensorboard_files(self, selector: Any = None, mangler: Any = None) -> None:
        """Have this rank's files for TensorBoard stored, with each checkpoint and at the end.

        Only needed with `TensorboardMode.MANUAL`. All files are stored, whatever `selector` says.
        """
        self._host.run.tensorboard.automatic = True

    def _report(
        self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any], group: str = ""
    ) -> None:
        source = f"train.report_{kind}_metrics"
        steps = checked_steps(steps_completed, source)
        self._host.report(kind, steps, plain_metrics(metrics, source), group)


class PreemptContext:
    """Tells whether to save and end. Follows Determined's class."""

    def __init__(self, host: ScriptHost, mode: PreemptMode) -> None:
        self._host = host
        self._refuses = mode is PreemptMode.ChiefOnly and host.distributed.get_rank() != 0
        if self._refuses:
            host.expect_stops()

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the run was asked to stop: store a checkpoint, then end the script.

        Ranks that ask equally often get True at the same call, without a collective: asking once
        a step costs nothing. Ranks that never ask cannot stop in time, and are killed.

        Args:
            auto_ack: accepted as in Determined, without effect.

        Raises:
            TrialError: with `PreemptMode.ChiefOnly`, a rank other than 0 calls this.
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


class ProfilerContext:
    """Accepts the calls of Determined's class, which sampled the use of the machine."""

    def on(self, sampling_interval: int = 1, samples_per_report: int = 10) -> None:
        """Warns that it has no effect."""
        logger.warning("profiler.on() has no effect; use torch.profiler")

    def off(self) -> None:
        """Does nothing."""


class Context(SaysWhatToUse):
    """The interface of a Core API script to its run. Follows ``determined.core.Context``.

    Attributes:
        train: reports metrics.
        checkpoint: stores and restores checkpoints.
        preempt: tells whether to save and end.
        searcher: says how long to train.
        distributed: which rank this is, and collectives of small objects.
        info: the trial, its hyperparameters, and the checkpoint to resume from.
        profiler: accepted as in Determined; has no effect.
        host: used by other parts of trialflow.
    """

    def __init__(
        self,
        host: ScriptHost,
        preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
        tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
    ) -> None:
        self.host = host
        self.train = TrainContext(host)
        self.checkpoint = CheckpointContext(host)
        self.preempt = PreemptContext(host, PreemptMode(preempt_mode))
        self.searcher = SearcherContext(host)
        self.distributed: DistributedContext = host.distributed
        self.info: ClusterInfo = host.info
        self.profiler = ProfilerContext()
        if TensorboardMode(tensorboard_mode) is TensorboardMode.MANUAL:
            host.run.tensorboard.set_automatic(False)

    def alert(
        self, title: str | None = None, description: str | None = None, level: str | None = "info"
    ) -> None:
        """Log a message, at a level such as ``"warn"``, and show it as the script's status."""
        text = ": ".join(filter(None, (title, description)))
        logger.log(_LEVELS.get(level or "info", logging.INFO), "%s", text)
        self.train.set_status(text)


def plain_metrics(metrics: Any, source: str) -> dict[str, Any]:
    """Metrics as plain data: tensors and arrays become numbers and lists.

    Raises TrialError if `metrics` is not a mapping, or a value is neither plain nor an array, or is
    an integer that does not fit into 64 bits.
    """
    if not isinstance(metrics, Mapping):
        raise TrialError(
            f"{source}: metrics is a mapping of names to values, got {type(metrics).__name__}"
        )
    return {
        str(name): _plain(value, f'{source}: metric "{name}"') for name, value in metrics.items()
    }


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, int):
        check_integer(value, place)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, place) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, place) for inner in value]
    if hasattr(value, "tolist"):  # a torch tensor, a NumPy array or scalar
        plain = value.tolist()
        while isinstance(plain, list) and len(plain) == 1:
            plain = plain[0]  # a loss of shape (1,) is a number, too
        if not hasattr(plain, "tolist"):  # NumPy has no Python number for a longdouble
            return _plain(plain, place)
    for kind in (int, float, str):  # a subclass, such as an enum, cannot be sent to the driver
        if isinstance(value, kind):
            return kind(value)
    raise TrialError(
        f"{place} is of type {type(value).__name__}; a metric is a number, text, an array, a "
        "tensor, or lists and mappings of these"
    )
