"""The host of a Core API script. Its driver commits checkpoints, keeps metrics and sends stops:
see `driver.follow_script`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from trial_core.cluster_info import ClusterInfo
from trial_core.config.lengths import named_length
from trial_core.driver.result import TrialResult
from trial_core.errors import CheckpointRefused, SlotsError
from trial_core.messages import (
    Activity,
    BatchesTrained,
    BatchesValidated,
    CheckpointWritten,
    FitBegun,
    Length,
    MetricsKind,
    MetricsReported,
    RestoredSettings,
    SettingsRestored,
    StopRequested,
)
from trial_core.processes.slots.receipts import Receipts
from trial_core.processes.slots.stop_barrier import StopBarrier
from trial_core.rank.checkpoint_files import CheckpointFiles
from trial_core.rank.collectives.accelerator import accelerator_name
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import AdapterBuilder, Controller
from trial_core.rank.training import BatchReporter
from trial_core.rank.trial.context import RunInfo
from trial_core.schedule.work import Work

ScriptMessage = (
    Activity
    | CheckpointWritten
    | MetricsReported
    | FitBegun
    | SettingsRestored
    | BatchesTrained
    | BatchesValidated
    | StopRequested
)


class ScriptHost:
    """Carries out the calls of a script's context, for one run of it. Every rank has one.

    Args:
        serve_fit: serves the driver's requests with the trial of `Trainer.fit`, until its end.
        on_first_question: called when the script asks for the first time whether to end.

    Attributes:
        max_length: where the experiment says that training ends, or the driver that it pauses; None
            if neither does.
        was_preempted: True if the script was told to save and end.
        best_validation: the best searcher metric that this rank knows of; at first that of the
            checkpoint that the script starts from.
        has_trainer: True if a `transformers.Trainer` has begun to train in this run of the script.
    """

    def __init__(
        self,
        info: ClusterInfo,
        distributed: DistributedContext,
        run: RunInfo,
        files: CheckpointFiles,
        emit: Callable[[ScriptMessage], None],
        stop_barrier: StopBarrier,
        receipts: Receipts,
        serve_fit: Callable[[Controller], None] | None = None,
        on_first_question: Callable[[], None] = lambda: None,
        best_validation: float | None = None,
        pause_at: Length | None = None,
    ) -> None:
        self.info = info
        self.distributed = distributed
        self.files = files
        self.max_length = named_length(run.experiment)
        if pause_at is not None:
            pause = {pause_at.unit: pause_at.value}
            self.max_length = named_length({"searcher": {"max_length": pause}})
        self.was_preempted = False
        self.best_validation = best_validation
        self.has_trainer = False
        self.run = run
        self._step_work: Work | None = None
        self._total = 0
        self._progress = BatchReporter(
            lambda steps: self._tell(BatchesTrained(batches=steps, total=self._total))
        )
        # Where the script's present training began: its steps, and when.
        self._training_since = (run.batches_trained, time.monotonic())
        self._serve_fit = serve_fit
        self._on_first_question = on_first_question
        self._has_asked = False
        self._error: BaseException | None = None
        self._emit = emit
        self._stop_barrier = stop_barrier
        self._receipts = receipts
        self._released: dict[str, str] = {}  # why a checkpoint was refused, or nothing
        self._uploading: str | None = None
        self._has_released = threading.Condition()

    def report(
        self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any], group: str = ""
    ) -> None:
        """Report metrics. Another rank than 0 waits until the driver has them.

        Rank 0 announces the checkpoints, so its reports cannot be overtaken by one.
        """
        rank = self.distributed.get_rank()
        message = MetricsReported(
            kind=kind, steps_completed=steps_completed, metrics=dict(metrics), group=group,
            rank=rank, receipt=self._receipts.expect() if rank != 0 else "",
        )  # fmt: skip
        begin, began = self._training_since
        if kind == "training" and self._step_work is not None:
            message.steps = max(0, steps_completed - begin)
            message.seconds = time.monotonic() - began
            message.work, message.device = self._step_work, accelerator_name()
        self._note_trained(steps_completed)
        if kind == "validation":
            self._note_validation(metrics)
        self.run.tensorboard.report(kind, steps_completed, metrics)
        self._tell(message)
        if message.receipt:
            self._receipts.wait(message.receipt)
            self._raise_error()

    def measure_steps(self, work: Work, is_default: bool = False) -> None:
        """Measure how fast the script trains from now on; one step holds `work`, unless that is the
        default and the script has said another."""
        if is_default and self._step_work is not None:
            return
        if self._step_work is None:  # the script's work before was not training
            self._note_trained(self.run.batches_trained)
        self._step_work = work

    def note_progress(self, steps: int, total: int) -> None:
        """Show that so many steps of `total` are trained. Rank 0's calls count."""
        if self.distributed.get_rank() == 0:
            self._total = total
            self._progress.report(steps)

    def _note_trained(self, steps_completed: int) -> None:
        self.run.batches_trained = steps_completed
        self._training_since = steps_completed, time.monotonic()

    def _note_validation(self, metrics: Mapping[str, Any]) -> None:
        searcher = self.run.experiment.get("searcher") or {}
        value, best = metrics.get(searcher.get("metric", "")), self.best_validation
        if isinstance(value, (int, float)) and math.isfinite(value):
            better = min if searcher.get("smaller_is_better", True) else max
            self.best_validation = float(value if best is None else better(value, best))

    def settings_restored(self, settings: RestoredSettings) -> None:
        """Tell people what counts after a restore. Every rank may call this; rank 0's counts."""
        if self.distributed.get_rank() == 0:
            self._tell(SettingsRestored(settings=settings))

    def set_status(self, text: str) -> None:
        """Rank 0 alone calls this."""
        self._tell(Activity(text=text))

    def expect_stops(self) -> None:
        """From now on, a signal to this rank asks the run to stop."""
        if not self._has_asked:
            self._has_asked = True
            self._on_first_question()

    def should_preempt(self) -> bool:
        """Return whether to save and end. Ranks that ask equally often get the same answers."""
        self.expect_stops()
        # A call is a step: the ranks agree on the last one without a collective.
        self.was_preempted = self.was_preempted or not self._stop_barrier.may_begin_step()
        self._raise_error()
        return self.was_preempted

    def commit(self, uuid: str, steps_completed: int, shard: bool, wait: bool = True) -> None:
        """Have a staged checkpoint uploaded and committed. There is one at a time.

        If `shard`, every rank calls this, else rank 0 alone. If not `wait`, the next call or
        `wait_for_upload` waits for the end.
        """
        self.wait_for_upload()
        if shard:
            self.distributed.allgather(None)  # all ranks have written their parts
        if self.distributed.get_rank() == 0:
            self._tell(CheckpointWritten(uuid=uuid, steps_completed=steps_completed, waits=wait))
        self._uploading = uuid
        if wait:
            self.wait_for_upload()
        self._note_trained(steps_completed)  # last: the wait is not training

    def wait_for_upload(self) -> None:
        """Wait until the last checkpoint is committed. If the run has failed, raises its error.

        Raises CheckpointRefused if it cannot be committed; the script may go on without it.
        """
        uuid, self._uploading = self._uploading, None
        with self._has_released:
            # Not collective: an upload may last longer than the deadline of collectives.
            self._has_released.wait_for(
                lambda: uuid is None or uuid in self._released or self._error is not None
            )
        self._raise_error()
        if uuid is not None and (refusal := self._released.pop(uuid)):
            raise CheckpointRefused(f"checkpoint {uuid} is not committed: {refusal}")

    def failed(self, error: BaseException) -> None:
        """Have the script's next call raise this: the run has failed elsewhere. For any thread."""
        with self._has_released:
            self._error = error
            self._has_released.notify_all()
        self._receipts.end()

    def _tell(self, message: ScriptMessage) -> None:
        self._raise_error()
        self._emit(message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def fit(self, asked: FitBegun, adapt: AdapterBuilder, ranks: DistributedContext) -> TrialResult:
        """Have the driver train a trial, and serve its requests until it has ended.

        Every rank calls this. `adapt` makes the adapter of the script's trial.
        """
        controller = Controller(
            adapt, self._emit, ranks, self._stop_barrier, lambda: self._emit(StopRequested()),
            self.run,
        )  # fmt: skip
        if self._serve_fit is None:
            raise SlotsError("this script is not run in a slot")
        if ranks.get_rank() == 0:
            self._emit(asked)
        with closing(controller):
            self._serve_fit(controller)
        return TrialResult(**(controller.fit_result or {}))

    def released(self, uuid: str, refusal: str = "") -> None:
        """Note that the driver has committed or refused a checkpoint. Called in the I/O lane."""
        with self._has_released:
            self._released[uuid] = refusal
            self._has_released.notify_all()


_SLOTS: list[ScriptHost] = []


def current_slot() -> ScriptHost | None:
    """The host of the script that this process runs; None outside a slot."""
    return _SLOTS[-1] if _SLOTS else None


@contextmanager
def in_slot(host: ScriptHost) -> Iterator[None]:
    """Make `current_slot` return `host` during the block."""
    _SLOTS.append(host)
    try:
        yield
    finally:
        _SLOTS.remove(host)
