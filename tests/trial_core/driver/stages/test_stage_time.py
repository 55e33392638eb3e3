"""How the stages of a run count their time. The ranks are fakes, and so are the seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import build_loaders
from trial_core.driver.stages.callbacks import callbacks
from trial_core.driver.stages.checkpoint import checkpoint_save
from trial_core.driver.stages.train_workload import train_workload
from trial_core.errors import RankFailed
from trial_core.messages import (
    BuildLoadersAndRestore,
    HookDone,
    ReadyToTrain,
    RunHook,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
)
from trial_core.observe.events.observers import Observer
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.schedule.sequencer import Progress


class FakeRanks:
    """Two ranks on which every request takes 10 s; the third train-workload fails."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.workloads = 0
        self.launch: Any = None

    def request(self, request: Any, expect: Any, **limits: Any) -> Any:
        self.now += 10
        if isinstance(request, BuildLoadersAndRestore):
            seconds = (3.0, 4.0) if request.batches_trained else (0.0, 0.0)
            return [ReadyToTrain(epoch=None, restore_seconds=each) for each in seconds]
        if isinstance(request, RunHook):
            return [HookDone(stop_requested=False)] * 2
        if isinstance(request, SaveCheckpoint):
            return [Saved(staging="", seconds=1.0)] * 2
        assert isinstance(request, TrainBatches)
        self.workloads += 1
        if self.workloads == 3:
            self.launch.note_batches(self.launch.status.batches_trained + 1)
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
    launch = Launch(Run(toy_config(tmp_path), "toy-0a", tmp_path, store, clock=clock))
    launch.slots = ranks  # type: ignore[assignment]
    ranks.launch = launch
    build_loaders(launch, ResumePoint())
    train_workload(launch, 0, 6)
    checkpoint_save(launch, Progress(6))
    callbacks(launch, "on_checkpoint_end", 6, {})
    assert clock.slot_milliseconds() == {
        "build": 20_000, "train": 20_000, "checkpoint_stall": 40_000,
    }  # fmt: skip
    build_loaders(launch, ResumePoint(progress=Progress(4)))
    train_workload(launch, 4, 8)
    launch.status.batches_trained = 8
    with pytest.raises(RankFailed):
        train_workload(launch, 8, 12)
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

    store = CheckpointStore(f"file://{tmp_path}")
    launch = Launch(Run(toy_config(tmp_path), "toy-0a", tmp_path, store, observer=Display()))
    launch.note_batches(7)
    assert (seen.batches, launch.run.clock.trained_to) == (7, 7)
