"""TensorBoard files and profiler traces of trials, on real ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import ONE_TWO_FOUR, Driven, drive, toy_config
from trial_core.messages import FinishRunFiles, RunFilesStored
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = [pytest.mark.slots, pytest.mark.parametrize("world_size", ONE_TWO_FOUR)]
Warm = Callable[[int], SlotGroup]


def config(folder: Path, batches: int, trial: str) -> Any:
    return toy_config(
        folder, batches, entrypoint=f"context_use_trials:{trial}",
        hyperparameters={"record": str(folder)},
    )  # fmt: skip


def scalars(folder: Path) -> dict[str, list[Any]]:
    """The events in a folder, by tag: (step, value) in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in seen.Scalars(tag)]
        for tag in seen.Tags()["scalars"]
    }


def uploaded(folder: Path, rank: int) -> Path:
    return folder / "checkpoints" / "runs" / "toy-0000beef" / "tensorboard" / f"rank-{rank}"


@dataclass
class Measured:
    """A finished run of 6 batches."""

    folder: Path
    run: Driven
    stored: list[RunFilesStored]


@pytest.fixture(scope="module")
def measured(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Measured]:
    """One such run for each number of ranks."""

    @functools.cache
    def drive_to_the_end(world_size: int) -> Measured:
        folder, slots = tmp_path_factory.mktemp("measured"), warm_slots(world_size)
        run = drive(slots, config(folder, 6, "Measuring"), folder)
        return Measured(folder, run, slots.request(FinishRunFiles(), RunFilesStored))

    return drive_to_the_end


def test_event_files_are_uploaded_with_the_run(
    measured: Callable[[int], Measured], world_size: int
) -> None:
    """Those of every rank; rank 0 has the run's metrics, too."""
    done = measured(world_size)
    assert [rank.problem for rank in done.stored] == [None] * world_size
    for rank in range(world_size):
        folder = uploaded(done.folder, rank)
        assert (folder / "note.txt").read_text() == f"rank {rank} at batch 5"
        seen = scalars(folder)
        assert seen.pop("own") == [(batch, 100 * rank + batch) for batch in range(6)]
        if rank == 0:
            assert seen["Determined/loss"] == [(6, pytest.approx(done.run.training[-1]["loss"]))]
            assert seen["Determined/val_loss"] == [
                (6, pytest.approx(done.run.validation[-1]["loss"]))
            ]
        else:
            assert seen == {}


def test_metrics_are_written_for_every_trial(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """By rank 0, from the validation before training on. The experiment may switch it off."""
    for name, settings in {"by default": {"tensorboard_logging": True}, "off": {}}.items():
        own = toy_config(
            tmp_path, 4, scheduling_unit=2, perform_initial_validation=True, **settings
        )
        drive(warm_slots(world_size), own, tmp_path / name)
    seen = scalars(tmp_path / "by default" / "tensorboard" / "rank-0")
    assert {tag: [step for step, _ in values] for tag, values in seen.items()} == {
        "Determined/loss": [2, 4],
        "Determined/rank": [2, 4],
        "Determined/val_loss": [0, 4],
        "Determined/val_mean_index": [0, 4],
    }
    assert not (tmp_path / "by default" / "tensorboard" / "rank-1").exists()
    assert not (tmp_path / "off" / "tensorboard").exists()


def test_a_profilers_trace_is_uploaded_with_the_run(
    measured: Callable[[int], Measured], world_size: int
) -> None:
    """One trace per rank. Wait 1, warm up 1, active 2: it contains batches 2 and 3."""
    for rank in range(world_size):
        folder = uploaded(measured(world_size).folder, rank)
        (trace,) = folder.glob(f"rank-{rank}.*.pt.trace.json")
        names = {str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]}
        assert {n for n in names if n.startswith("toy_batch")} == {"toy_batch_2", "toy_batch_3"}


def test_event_files_are_uploaded_with_each_checkpoint(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """A run that is killed after a checkpoint has lost no earlier events."""
    drive(warm_slots(world_size), config(tmp_path, 3, "Measuring"), tmp_path, persist=True)
    for rank in range(world_size):
        assert [step for step, _ in scalars(uploaded(tmp_path, rank))["own"]] == [0, 1, 2]


def test_uploads_can_be_switched_off(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """The files are then only in the run's folder on this machine."""
    slots = warm_slots(world_size)
    drive(slots, config(tmp_path, 2, "WithoutUploads"), tmp_path, persist=True)
    assert slots.request(FinishRunFiles(), RunFilesStored) == [RunFilesStored(files=0)] * world_size
    for rank in range(world_size):
        assert not uploaded(tmp_path, rank).exists()
        assert set(scalars(tmp_path / "tensorboard" / f"rank-{rank}")) == {"own"}
