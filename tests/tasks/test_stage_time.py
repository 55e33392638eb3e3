"""How the stages of a flow count their time. The ranks are fakes, and so are the seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed
from trial_core.ledger.run_clock import RunClock
from trial_core.messages import (
    BuildLoaders,
    HookDone,
    LoadersBuilt,
    RunHook,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
)
from trial_core.run.observer import Observer
from trial_core.run.sequencer import Progress
from trialflow.tasks.build import build_loaders
from trialflow.tasks.callbacks import callbacks
from trialflow.tasks.checkpoint import checkpoint_save
from trialflow.tasks.train_workload import train_workload
from trialflow.tasks.trial_run import TrialRun


class FakeRanks:
    """Two ranks on which every request takes 10 s; the third train-workload fails."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.workloads = 0
        self.run: Any = None

    def request(self, request: Any, expect: Any, **limits: Any) -> Any:
        self.now += 10
        if isinstance(request, BuildLoaders):
            seconds = (3.0, 4.0) if request.batches_trained else (0.0, 0.0)
            return [LoadersBuilt(epoch=None, restore_seconds=each) for each in seconds]
        if isinstance(request, RunHook):
            return [HookDone(stop_requested=False)] * 2
        if isinstance(request, SaveCheckpoint):
            return [Saved(staging="", seconds=1.0)] * 2
        assert isinstance(request, TrainBatches)
        self.workloads += 1
        if self.workloads == 3:
            self.run.note_batches(self.run.batches_trained + 1)
            self.now += 90
            raise RankFailed(rank=0, host="node-1", during="train-workload")
        until = request.until
        return [Trained(batches_trained=until, metrics={}, seconds=1.0, stop_requested=False)] * 2


def test_the_stages_of_a_run_by_bucket(tmp_path: Path) -> None:
    """The slowest rank's restore is no building; redone batches are those lost before."""
    ranks = FakeRanks()
    clock = RunClock(now=lambda: ranks.now)
    clock.has_slots(2)
    clock.switch("idle")
    store = CheckpointStore(f"file://{tmp_path}")
    run = TrialRun(toy_config(tmp_path), "toy-0a", tmp_path, store, Observer(), clock=clock)
    run.slots = ranks  # type: ignore[assignment]
    ranks.run = run
    with disable_run_logger():
        build_loaders.fn(run, ResumePoint())
        train_workload.fn(run, 0, 6)
        checkpoint_save.fn(run, Progress(6))
        callbacks.fn(run, "on_checkpoint_end", 6, {})
        assert clock.slot_milliseconds() == {
            "build": 20_000, "train": 20_000, "checkpoint_stall": 40_000,
        }  # fmt: skip
        build_loaders.fn(run, ResumePoint(progress=Progress(4)))
        train_workload.fn(run, 4, 8)
        run.batches_trained = 8
        with pytest.raises(RankFailed):
            train_workload.fn(run, 8, 12)
    assert clock.slot_milliseconds() == {
        "build": 20_000 + 12_000, "restore": 8_000, "train": 20_000 + 10_000 + 20_000,
        "redone": 10_000, "checkpoint_stall": 40_000, "idle": 180_000,
    }  # fmt: skip
    assert clock.trained_to == 9


def test_a_run_notes_batches_for_both(tmp_path: Path) -> None:
    """The display and the ledger hear the same."""
    seen = SimpleNamespace(batches=0)

    class Display(Observer):
        def batches_trained(self, batches: int) -> None:
            seen.batches = batches

    run = TrialRun(
        toy_config(tmp_path), "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"), Display()
    )
    run.note_batches(7)
    assert (seen.batches, run.clock.trained_to) == (7, 7)
