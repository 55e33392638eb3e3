"""`TrialRun`: what the stages of one run share."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import RankFailed
from trial_core.ledger.run_clock import RunClock
from trial_core.retention.claims import RunClaim
from trial_core.run.observer import Observer
from trial_core.run.stop_requests import StopHandler
from trial_core.slots.slot_group import SlotGroup
from trial_core.transfer.trial_code import TrialCode
from trial_core.units import EpochLength


class TrialRun:
    """One launch of the ranks of a trial. A restart of the ranks is a new `TrialRun`.

    Attributes:
        config: the experiment.
        trial: the trial's id.
        attempt: a random id of this launch, stored as `Manifest.attempt`. The attempt of `fence` is
            the flow run's, and the same for all its launches.
        run_dir: the trial's folder on this machine: logs, staged checkpoints, the report.
        store: the trial's checkpoint storage.
        slots: the ranks, once they are launched.
        world_size: how many ranks this launch has; 0 before that is known.
        logger: of the task that runs, for what its ranks do.
        observer: gets the run's events.
        stopping: stop requests to this run.
        claim: announces which checkpoints this run needs, so that they are not pruned.
        fence: whether this run may still commit; None if no other run can take over the trial.
        devices: environment variables that give the ranks this run's accelerators.
        code: the trial's code, which the ranks start in and checkpoints name.
        clock: measures what the run's slots do, over all its launches.
        metrics: the last ones of each kind.
        script_events: what a Core API script reports, and in the end its results.
        validated: the metrics of the last validation, which may not be reported yet.
        hooks: the callback hooks that the trial overrides, once it is built.
        topology, versions, batch_samples: reported by the ranks, once the trial is built.
        epoch: the length of an epoch, once the loaders are built; None if it is unknown.
        stop_requested: whether the trial has requested a stop.
        moves: why the ranks save and end now, to be launched on other nodes; None: they do not.
        can_save: whether a workload has begun. A stop request before that aborts the ranks.
        end: the batch at which training ends, once it is known; 0: unknown.
        has_trained: whether this launch has trained a batch.
        batches_trained: where the last train-workload ended, or this launch began.
        writes_run_files: whether a rank writes files for TensorBoard.
        tensorboard_url: where these files are, once they are uploaded.
    """

    slots: SlotGroup

    def __init__(
        self,
        config: ExperimentConfig,
        trial: str,
        run_dir: Path,
        store: CheckpointStore,
        observer: Observer,
        stopping: StopHandler | None = None,
        claim: RunClaim | None = None,
        fence: Fence | None = None,
        devices: Mapping[str, str] | None = None,
        code: TrialCode | None = None,
        clock: RunClock | None = None,
    ) -> None:
        self.config = config
        self.trial = trial
        self.attempt = uuid.uuid4().hex
        self.run_dir = run_dir
        self.store = store
        self.observer = observer
        self.stopping = stopping or StopHandler(0)
        self.claim = claim or RunClaim(store, trial)
        self.fence = fence
        self.devices = devices or {}
        self.code = code or TrialCode(config.code)
        self.clock = clock or RunClock()
        self.logger: Logger | LoggerAdapter[Any] = logging.getLogger(__name__)
        self.script_events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.metrics: dict[str, dict[str, Any]] = {}
        self.validated: dict[str, Any] = {}
        self.hooks: frozenset[str] = frozenset()
        self.topology: Topology | None = None
        self.versions: dict[str, str] = {}
        self.batch_samples = 0
        self.epoch: EpochLength | None = None
        self.stop_requested = False
        self.moves: str | None = None
        self.can_save = False
        self.end = 0
        self._moves_at_checkpoint: str | None = None
        self.world_size = 0
        self.has_trained = False
        self.batches_trained = 0
        self.writes_run_files = False
        self.tensorboard_url: str | None = None

    @property
    def should_stop(self) -> bool:
        """Whether to save and end: the trial or a stop request asks for it, or the ranks move."""
        return self.stop_requested or self.stopping.request is not None or self.moves is not None

    def move_now(self, why: str) -> None:
        """Have the ranks save and end, to be launched on other nodes. For any thread."""
        if self.moves is None:
            self.moves = why
            self.clock.drains()
            if self.can_save:
                self.logger.info("the run saves, to continue on other nodes: %s", why)
                self.slots.stop()
            else:
                self.logger.info("the run continues on other nodes: %s", why)
                self.slots.abort("nothing to save: training had not begun")

    def move_at_checkpoint(self, why: str) -> None:
        """As `move_now`, after the next checkpoint. For any thread."""
        self.logger.info("%s: the run takes them after its next checkpoint", why)
        self._moves_at_checkpoint = why

    def has_saved(self, batches_trained: int) -> None:
        """Note that a checkpoint is staged. The run may move now, if there is more to do."""
        why, is_over = self._moves_at_checkpoint, self.end and batches_trained >= self.end
        if why is not None and not is_over and not self.should_stop:
            self.move_now(why)

    def note_batches(self, batches: int) -> None:
        """Note that training has reached `batches`. Also called in the channel's thread."""
        self._note_trained(batches)
        self.clock.batches_trained(batches)
        self.observer.batches_trained(batches)

    def note_failure(self, failure: RankFailed) -> None:
        """Note that a rank has raised, maybe after batches of a workload that has not ended."""
        self._note_trained(failure.batches_trained or 0)

    def _note_trained(self, batches: int) -> None:
        self.has_trained = self.has_trained or batches > self.batches_trained

    def note_activity(self, text: str) -> None:
        """Tell people what a stage does that takes long. Called in the channel's thread."""
        self.logger.info("%s", text)
        self.observer.stage_takes_long(text)

    @contextmanager
    def stage(self, name: str, detail: str) -> Iterator[None]:
        """Report a stage's start and end to the observer, and count its time.

        Args:
            detail: of a hook's stage, begins with the hook's name.
        """
        self.observer.stage_started(name, detail)
        began = time.monotonic()
        with self.clock.in_stage(name, detail.partition(" ")[0]):
            yield
        self.observer.stage_ended(name, detail, time.monotonic() - began)
