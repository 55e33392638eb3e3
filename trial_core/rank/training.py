"""The training loop: one train-workload, with the hooks in it that `PyTorchCallback` lists.

`on_training_workload_end` is the next stage. For the whole route of a stop, see
`trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.errors import TrialError
from trial_core.messages import MetricsKind, NonFinite
from trial_core.processes.slots.stop_barrier import StopBarrier
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.loaders import MicroBatches
from trial_core.rank.state_files.late_copies import finish_copies
from trial_core.rank.trial.callback import PyTorchCallback, overridden_hooks, trial_callbacks
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.metric_reduction import BatchMetrics, Partials, calls_over_ranks, combine
from trial_core.rank.trial.optimizer_modes import to_training_mode
from trial_core.rank.trial.trial_adapter import TrialAdapter, accepts

REPORT_SECONDS = 0.2


@dataclass
class TrainOutcome:
    """The metrics of `reduce_training`, and which of this rank's were once NaN or infinite."""

    avg_metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]]
    non_finite: dict[str, NonFinite]


class BatchReporter:
    """Reports the number of batches done, at most once per `REPORT_SECONDS`."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._next = 0.0

    def report(self, batches: int) -> None:
        """Report `batches`, unless the last report is too recent."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_SECONDS
            self._send(batches)


@dataclass(frozen=True)
class TrainingLoop:
    """Trains the batches of one trial on this rank, workload by workload.

    Attributes:
        micro_batches: this rank's training data, or None if the trial reads it itself.
        wants_batch_metrics: True if a callback of any rank gets them; the same on every rank.
        progress: gets the number of batches trained, but not at a workload's end: the answer tells
            it, and a message wakes the driver, 2 ms on a busy machine.
        on_first_batch: called after the first batch of a workload. May be collective.
        on_stop_requested: called after each batch while this rank's trial requests a stop.
    """

    adapter: TrialAdapter
    info: RunInfo
    micro_batches: MicroBatches | None
    distributed: DistributedContext
    wants_batch_metrics: bool
    stop_barrier: StopBarrier
    progress: BatchReporter
    on_first_batch: Callable[[], None]
    on_stop_requested: Callable[[], None]

    def train(self, until: int) -> TrainOutcome:
        """Train from `info.batches_trained` up to `until`. Collective: every rank calls this."""
        adapter, info, micro_batches = self.adapter, self.info, self.micro_batches
        stop_barrier, first_batch = self.stop_barrier, info.batches_trained
        stop_barrier.begin_workload(has_breaks=True)
        if micro_batches is not None:
            samples_before, uncounted = micro_batches.samples, micro_batches.uncounted
        metrics = BatchMetrics()
        collect = metrics.add_call if adapter.reports_training_metrics else _no_metrics
        adapter.reducers.reset("training")
        adapter.set_training(True)
        to_training_mode(adapter.optimizers)
        ready_made = trial_callbacks(adapter.callbacks)
        hooks = overridden_hooks(adapter.callbacks) if info.epoch else frozenset()
        epoch_of = info.epoch.epoch_of if info.epoch else _no_epoch
        before, epoch_idx = epoch_of(first_batch - 1) if first_batch else -1, epoch_of(first_batch)
        while info.batches_trained < until and stop_barrier.may_begin_step():
            batch_idx = info.current_batch = info.batches_trained
            if epoch_idx > before and "on_training_epoch_start" in hooks:
                _begin_epochs(adapter.callbacks, range(before + 1, epoch_idx + 1))
            adapter.train_batch(micro_batches, epoch_idx, batch_idx, collect)
            if micro_batches is not None:
                micro_batches.batch_ended()
            for callback in ready_made:
                callback.batch_ended()
            before, epoch_idx = epoch_idx, epoch_of(batch_idx + 1)
            if epoch_idx > before and "on_training_epoch_end" in hooks:
                _end_epochs(adapter.callbacks, range(before, epoch_idx))
            info.batches_trained = batch_idx + 1
            info.tensorboard.batch_ended()
            if info.batches_trained < until:
                self.progress.report(info.batches_trained)
            if info.batches_trained == first_batch + 1:
                self.on_first_batch()
            if info.stop_requested:
                self.on_stop_requested()
        if info.batches_trained == first_batch:
            return TrainOutcome({}, [], {})  # nothing to average
        if micro_batches is not None and micro_batches.uncounted == uncounted:
            samples = micro_batches.samples - samples_before
            info.samples_trained += samples * adapter.data_parallel_size
        reduced = reduce_training(metrics, adapter, self.distributed, self.wants_batch_metrics)
        batches = info.batches_trained - first_batch
        return TrainOutcome(*reduced, metrics.non_finite(first_batch, batches))


def _no_metrics(outcome: Any) -> None:
    """Of a rank whose metrics do not count."""


def _no_epoch(batch_idx: int) -> int:
    """The epoch of a batch where epochs have no length."""
    return 0


def _begin_epochs(callbacks: Mapping[str, PyTorchCallback], epochs: range) -> None:
    finish_copies("on_training_epoch_start")  # it may change weights
    for begun in epochs:
        for callback in callbacks.values():
            if accepts(callback.on_training_epoch_start, begun):
                callback.on_training_epoch_start(begun)
            else:  # as in old releases of Determined
                callback.on_training_epoch_start()  # type: ignore[call-arg]


def _end_epochs(callbacks: Mapping[str, PyTorchCallback], epochs: range) -> None:
    finish_copies("on_training_epoch_end")
    for ended in epochs:
        for callback in callbacks.values():
            callback.on_training_epoch_end(ended)


def reduce_training(
    metrics: BatchMetrics, adapter: TrialAdapter, distributed: DistributedContext, with_calls: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reduce the metrics of a train-workload. Collective: every rank calls this.

    This is the workload's only wait for the accelerator, and one exchange between ranks; custom
    reducers need a second one. Returns, the same on every rank, the averages, with custom
    reducers'; and if `with_calls`, which is the same on every rank, for each call of train_batch
    its metrics, averaged over ranks. Raises TrialError if ranks report different metrics, or a
    custom reducer has the name of another metric.
    """
    counts = adapter.reports_training_metrics
    own = metrics.partials(with_values=with_calls) if counts else Partials()
    partials = distributed.allgather(own)
    reduced = with_custom("training", combine(partials), adapter, distributed)
    return reduced, calls_over_ranks(partials) if with_calls else []


def with_custom(
    kind: MetricsKind,
    reduced: dict[str, Any],
    adapter: TrialAdapter,
    distributed: DistributedContext,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    """`reduced`, with the metrics of the trial's custom reducers. Collective."""
    custom = adapter.reducers.reduce(
        kind, distributed.allgather, counts=adapter.reports_metrics, contribution=contribution
    )
    duplicates = sorted(reduced.keys() & custom.keys())
    if duplicates:
        raise TrialError(
            f"{kind} metric(s) {', '.join(duplicates)} are both returned by the trial and given by "
            "a wrapped reducer; rename one of them"
        )
    return reduced | custom
