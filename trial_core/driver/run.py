"""A run and its launches: the parts of the run, its ranks' answers, and its progress."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import TrialCode
from trial_core.common.any_logger import AnyLogger
from trial_core.config import ExperimentConfig
from trial_core.driver.choose_resume_point import resume_points
from trial_core.driver.loss_watch import LossWatch
from trial_core.errors import RankFailed
from trial_core.messages import (
    AnyRequest,
    FitBegun,
    MayStop,
    MetricsReported,
    ReportTaken,
    Result,
    ScriptEvent,
)
from trial_core.observe.events.observers import Observer
from trial_core.observe.events.throughput import ThroughputMeter
from trial_core.observe.ledger.run_clock import Bucket, RunClock
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.schedule.stop_requests import StopHandler, why_early
from trial_core.schedule.units import EpochLength, TrainUnit

R = TypeVar("R", bound=Result)
TestMode = Literal["keep nothing", "restore", "compare"]

CHANGES = 20
"""A manifest tells of at most so many resumes with changes."""

HOW_TO_GO_ON = (
    "to train it further, raise searcher.max_length; to begin a new trial, start a run without "
    "`trial` (`trialflow train` without --resume)"
)


@dataclass(kw_only=True)
class Given:
    """What a flow or script gives the run that it starts.

    Attributes:
        attempt: identifies the start of the run; the same value again continues that attempt.
        stopping: stop requests to this run.
        find_logger: returns the log of the calling thread's stage, else of the run.
        execute: returns what a call of a stage (`DeclaredStage`) does; None for `plain`.
        publish: shows the text of the report; None if the report is only a file.
        publish_errors: the errors that `publish` may raise, besides trialflow's own.
        links: the run's pages elsewhere, by their names, for the report.
        devices: environment variables that give the ranks this run's accelerators.
        is_new: True if the trial is new, see `own_trial`.
        storage: the mark of the storage, if the run has begun before.
        begun: called with that mark once the run has its trial; not for ``memory://``.
        take_over: True to take the trial from another run that may be live.
        keep: settings of optimizers and the like that stay as in the checkpoint, see `check_keep`.
        takeover_wait_seconds: how long to wait for the trial's folder, which a run that is about to
            end may hold.
        waited_seconds: how long the run has waited for its devices.
        micro_batch_samples: see `BuildTrial`; of the next launch.
        fit: what a script's `Trainer.fit` asks for, if its ranks join for that.
        has_metric: True if the run has a searcher metric; a script need not.
        how_to_go_on: advice for a trial that has reached its maximum length.
        choose_resume_points: returns the resume points, best first; None for the trial's
            checkpoints, else the experiment's source.
        has_code: True if the code folder holds code that checkpoints should name.
        pause_at: where the run validates, saves and ends, although the trial is to be trained
            further later; None to train it to its end.
        task: see `locked_run_dir`.
    """

    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)
    stopping: StopHandler = field(default_factory=lambda: StopHandler(0))
    find_logger: Callable[[], AnyLogger] = lambda: logging.getLogger(__name__)
    execute: Callable[[Any], Callable[..., Any]] | None = None
    observer: Observer = field(default_factory=Observer)
    publish: Callable[[str], None] | None = None
    publish_errors: tuple[type[Exception], ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    is_new: bool | None = None
    storage: str | None = None
    begun: Callable[[str], None] = lambda mark: None
    take_over: bool = False
    keep: Sequence[str] = ()
    takeover_wait_seconds: float = 0.0
    waited_seconds: float = 0.0
    micro_batch_samples: int | None = None
    fit: FitBegun | None = None
    has_metric: bool = True
    how_to_go_on: str = HOW_TO_GO_ON
    choose_resume_points: (
        Callable[[CheckpointStore, Fence | None], Iterator[ResumePoint]] | None
    ) = None
    has_code: bool = True
    pause_at: TrainUnit | None = None
    task: str = ""


@dataclass
class Run(Given):
    """A run: what it was given, and what is the same for all its launches.

    Attributes:
        run_dir: the trial's folder on this machine: logs, staged checkpoints, the report.
        claim: protects the checkpoints that this run needs from prunes. None if no prune can
            happen.
        fence: tells if this run may still commit; None if no other run can take over the trial.
        clock: measures how the run's slots spend their time.
        test_mode: set to train and validate one batch, and keep no checkpoint, or restore it; or to
            end once the changes since the checkpoint are known.
        weight_warnings: what was said of weights that are not trained.
        stored_checkpoints: how many this run has committed.
        throughput: of all train-workloads.
    """

    config: ExperimentConfig
    trial: str
    run_dir: Path
    store: CheckpointStore
    claim: RunClaim | None = None
    fence: Fence | None = None
    clock: RunClock = field(default_factory=RunClock)
    test_mode: TestMode | None = None
    weight_warnings: set[str] = field(default_factory=set)
    stored_checkpoints: int = 0
    throughput: ThroughputMeter = field(init=False)

    def __post_init__(self) -> None:
        self.throughput = ThroughputMeter(self.config.resources.peak_flops)

    def resume_points(self) -> Iterator[ResumePoint]:
        """Return the present resume points of the run, best first; at least one.

        Raises Superseded if another run has taken over the trial; StorageError if this is not the
        storage that the run began with: it may be empty.
        """
        if self.choose_resume_points is not None:
            points = self.choose_resume_points(self.store, self.fence)
        else:
            points = resume_points(self.store, self.config, self.trial)
        if self.fence is not None:  # after the listing, so it was the right storage
            self.fence.check(f"trial {self.trial} is not continued")
        searcher = self.config.searcher
        return (each.measured_by(searcher.metric, searcher.smaller_is_better) for each in points)

    @property
    def metric(self) -> str | None:
        return self.config.searcher.metric if self.has_metric else None

    @property
    def logger(self) -> AnyLogger:
        """The log of the stage that the calling thread executes, else of the run."""
        return self.find_logger()


@dataclass
class RankAnswers:
    """The answers of the ranks of one launch.

    Attributes:
        hooks: the callback hooks that the trial overrides, once it is built.
        topology, versions, batch_samples: set once the trial is built.
        extra_samples: of the last train-workload, see `Progress`.
        epoch: the length of an epoch, once the loaders are built; None if it is unknown.
        loads_micro_batches: True if micro-batches may be made smaller: the loaders follow.
        may_add_metrics: True if a callback may add validation metrics, once check-metrics has run.
        validated: the metrics of the last validation, which may not be reported yet.
        stop_requested, stop_reason: by the trial, which need not give a reason.
        writes_run_files: True if a rank writes files for TensorBoard.
        earlier_changes: those that the checkpoint tells, see `Manifest.changes`.
        changes: what has changed since the checkpoint, as sentences.
    """

    hooks: frozenset[str] = frozenset()
    topology: Topology | None = None
    versions: dict[str, str] = field(default_factory=dict)
    batch_samples: int = 0
    extra_samples: int = 0
    epoch: EpochLength | None = None
    loads_micro_batches: bool = False
    may_add_metrics: bool = False
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    validated: dict[str, Any] = field(default_factory=dict)
    stop_requested: bool = False
    stop_reason: str | None = None
    writes_run_files: bool = False
    keep: list[str] = field(default_factory=list)
    earlier_changes: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def all_changes(self) -> list[str]:
        """The changes of the trial, for the manifest."""
        own = [". ".join(self.changes)] if self.changes else []
        return [*self.earlier_changes, *own][-CHANGES:]


@dataclass
class LaunchStatus:
    """The progress of one launch.

    Attributes:
        can_save: True once training has begun. A stop request before that aborts the ranks.
        end: the batch at which training ends, once it is known; 0: unknown.
        batches_trained: the batch at which the last train-workload ended, or this launch began.
        saved_at: batches trained at the last checkpoint that the trial can continue from.
        moves: why the ranks save and end now, to be launched on other nodes; else None.
        tensorboard_url: the folder of the trial's TensorBoard files, once they are uploaded.
    """

    can_save: bool = False
    end: int = 0
    began_at: int = 0
    has_trained: bool = False
    batches_trained: int = 0
    saved_at: int | None = None
    moves: str | None = None
    tensorboard_url: str | None = None


class Launch:
    """One launch of a run's ranks. A restart is another launch.

    Attributes:
        code: the trial's code, which the ranks start in and checkpoints name.
        micro_batch_samples: samples of a micro-batch, in place of the configured number.
        id: a random id of this launch, stored as `Manifest.writer`.
        world_size: the number of ranks of this launch; 0 before that is known.
        script_events: the reports of a script, and in the end its results.
        has_failed: True once an error has ended the launch; stages of the user's own are killed.
        has_refused: True if the last upload was refused, as a rank had copied wrong weights.
    """

    slots: SlotGroup

    def __init__(self, run: Run, code: TrialCode | None = None) -> None:
        self.run = run
        self.micro_batch_samples = run.micro_batch_samples
        self.code = code or TrialCode(run.config.code)
        self.id = uuid.uuid4().hex
        self.world_size = 0
        self.script_events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers = RankAnswers()
        self.status = LaunchStatus()
        self.losses = LossWatch(run.config.stopping.fail_on_non_finite_loss)
        self.has_failed = False
        self.has_refused = False
        self._moves_at_checkpoint: str | None = None

    def ask(
        self,
        request: AnyRequest,
        expect: type[R],
        stall_seconds: float | Literal["idle"] | None = "idle",
    ) -> list[R]:
        """Have every rank carry out a request. Return all results, in the order of ranks.

        Args:
            expect: the result type of this request.
            stall_seconds: how long the ranks may make no progress; None for no limit. ``idle`` for
                stages that train no batch (`stopping.idle_timeout_seconds`).

        Raises:
            RankFailed, Stalled, Stopped: as `SlotGroup.request`.
        """
        if stall_seconds == "idle":
            stall_seconds = self.run.config.stopping.idle_timeout_seconds
        return self.slots.request(request, expect, stall_seconds=stall_seconds)

    @property
    def should_stop(self) -> bool:
        """True if the ranks are to save and end: by request of the trial or another, or to move."""
        return self._is_asked_to_stop or self.status.moves is not None

    def moves_after(self, stopped_early: bool) -> bool:
        """Return whether the run continues on other nodes, once these ranks have ended."""
        moves = self.status.moves is not None
        return moves and stopped_early and not self._is_asked_to_stop

    @property
    def _is_asked_to_stop(self) -> bool:
        return self.answers.stop_requested or self.run.stopping.request is not None

    def note_stop_requests(self, ranks: Sequence[MayStop]) -> None:
        """Note whether the trial has requested a stop on a rank; log the request once."""
        answers, asking = self.answers, [rank for rank in ranks if rank.stop_requested]
        if asking and not answers.stop_requested:
            answers.stop_requested = True
            answers.stop_reason = next((r.stop_reason for r in asking if r.stop_reason), None)
            self.run.logger.info(
                "the run saves and completes early%s", why_early(answers.stop_reason)
            )

    def warn(self, warnings: Sequence[str]) -> None:
        """Log warnings, and show them in the report and to the observer."""
        for warning in warnings:
            self.run.logger.warning("%s", warning)
            self.run.observer.notice(warning)

    def withholds_checkpoint(self, batches_trained: int, is_last: bool) -> bool:
        """Return whether no checkpoint may be stored now: the losses are not finite. Logs it."""
        withholds = self.losses.withholds_checkpoint(is_last)
        if withholds:
            self.run.logger.warning(
                "no checkpoint is stored at batch %d: the loss is not finite since batch %d",
                batches_trained, self.losses.since,
            )  # fmt: skip
        return withholds

    def may_save(self) -> None:
        """Note that from now on, ranks that have to stop or move save first."""
        self.status.can_save = True
        if self.status.moves:
            self.slots.stop()

    def move_now(self, why: str) -> None:
        """Have the ranks save and end, to be launched on other nodes. For any thread."""
        if self.status.moves is None:
            self.status.moves = why
            self.run.clock.drains()
            if self.status.can_save:
                self.run.logger.info("the run saves, to continue on other nodes: %s", why)
                self.slots.stop()
            else:
                self.run.logger.info("the run continues on other nodes: %s", why)
                self.slots.abort("nothing to save: training had not begun")

    def move_at_checkpoint(self, why: str) -> None:
        """Have the launch move after its next checkpoint, as `move_now` does. For any thread."""
        self.run.logger.info("%s: the run takes them after its next checkpoint", why)
        self._moves_at_checkpoint = why

    def has_saved(self, batches_trained: int) -> None:
        """Note that a checkpoint is staged. The run may now move, if it has more to train."""
        self.status.saved_at = batches_trained
        why, end = self._moves_at_checkpoint, self.status.end
        if why is not None and not (end and batches_trained >= end) and not self.should_stop:
            self.move_now(why)

    def note_batches(self, batches: int, total: int = 0) -> None:
        """Note how far training is, of `total` as in `BatchesTrained`. Also in the channel's
        thread.
        """
        if total not in (0, self.status.end):
            self.status.end = total
            self.run.observer.length_known(total)
        self._note_trained(batches)
        self.run.clock.batches_trained(batches)
        self.run.observer.batches_trained(batches)

    def note_failure(self, failure: RankFailed) -> None:
        """Note that a rank has raised, maybe in the middle of a workload."""
        self._note_trained(failure.batches_trained or 0)

    def _note_trained(self, batches: int) -> None:
        progress = self.status
        progress.has_trained = progress.has_trained or batches > progress.batches_trained

    def note_activity(self, text: str) -> None:
        """Tell people about the progress of a long stage. Called in the channel's thread."""
        self.run.logger.info("%s", text)
        self.run.observer.stage_takes_long(text)

    def note_script_event(self, event: ScriptEvent) -> None:
        """Queue a script's event, and then send the receipt. Called in the channel's thread."""
        self.script_events.put(event)
        if isinstance(event, MetricsReported) and event.receipt:
            self.slots.tell(ReportTaken(receipt=event.receipt))

    @contextmanager
    def stage(self, name: str, detail: str, bucket: Bucket | None) -> Iterator[None]:
        """Report a stage to the observer, and count its time in `bucket`, if it has one."""
        observer = self.run.observer
        observer.stage_started(name, detail)
        began = time.monotonic()
        with self.run.clock.spending(bucket) if bucket else nullcontext():
            yield
        observer.stage_ended(name, detail, time.monotonic() - began)
