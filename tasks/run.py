"""What the stages of one run share: its names and places, its slot group, and who watches."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.retention.claims import Running
from trial_core.run.observer import Observer
from trial_core.run.stop_request import StopHandler
from trial_core.slots.group import SlotGroup
from trial_core.units import EpochLength


class TrialRun:
    """One attempt at training a trial.

    Attributes:
        config: the experiment.
        trial: the trial's id; the same over all attempts at it.
        attempt: this attempt's id; it signs the checkpoints that this attempt commits.
        run_dir: the trial's folder on this machine: logs, staged checkpoints, the report.
        store: where its checkpoints are kept.
        slots: its ranks, once they are launched.
        observer: who watches.
        stopping: whether it has been asked to stop.
        claim: tells those who delete checkpoints what this run needs.
        fence: says whether this run may still commit; None: nobody else can be at the trial.
        devices: variables for its ranks that say which accelerators are its own.
        metrics: the last ones of each kind.
        hooks: the callback hooks that the trial overrides, once it is built.
        topology, versions, batch_samples: what the ranks said of themselves, once it is built.
        epoch: how long one is, once the loaders are built, if they have a length.
        stop_requested: whether the trial has asked to save and end.
        can_save: whether there may be something to save: training may have begun.
        has_trained: whether this attempt has got through a train-workload.
        batches_trained: where the last train-workload ended, or this attempt began.
        writes_run_files: whether some rank writes files for TensorBoard, to upload with the run.
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
        claim: Running | None = None,
        fence: Fence | None = None,
        devices: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.trial = trial
        self.attempt = uuid.uuid4().hex
        self.run_dir = run_dir
        self.store = store
        self.observer = observer
        self.stopping = stopping or StopHandler(0)
        self.claim = claim or Running(store, trial)
        self.fence = fence
        self.devices = devices or {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.hooks: frozenset[str] = frozenset()
        self.topology: Topology | None = None
        self.versions: dict[str, str] = {}
        self.batch_samples = 0
        self.epoch: EpochLength | None = None
        self.stop_requested = False
        self.can_save = False
        self.has_trained = False
        self.batches_trained = 0
        self.writes_run_files = False

    @property
    def is_to_stop(self) -> bool:
        """Whether to save and end: the trial has asked for it, or somebody else."""
        return self.stop_requested or self.stopping.request is not None

    @contextmanager
    def stage(self, name: str, detail: str) -> Iterator[None]:
        """Tell the observer that a stage runs."""
        self.observer.stage_started(name, detail)
        began = time.monotonic()
        yield
        self.observer.stage_ended(name, detail, time.monotonic() - began)
