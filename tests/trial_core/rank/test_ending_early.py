"""A stop request ends a workload early, on all ranks after the same batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import build, drive, lines, toy_config, warm_group
from tests.support.tensors import differing, tensors
from trial_core.errors import Stalled
from trial_core.messages import BuildLoadersAndRestore, ReadyToTrain, TrainBatches, Trained
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
TIMEOUT_SECONDS = 60.0


def waiting(folder: Path, **where: int) -> dict[str, Any]:
    """Hyperparameters of a toy that waits on rank 1 until the run is stopped."""
    return {
        "record": str(folder), "do": "wait", "do_rank": 1, "once": str(folder / "there"),
        "wait_for": str(folder / "stopped"), "train_samples": 50, **where,
    }  # fmt: skip


def stop_at_wait(slots: SlotGroup, folder: Path, *besides: str) -> threading.Thread:
    """Stop the run once rank 1 waits and the files `besides` exist; then let rank 1 continue.

    Not before every rank has paused: on a busy machine rank 1 could finish its workload first.
    """

    def wait(is_so: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.01)

    def stop() -> None:
        there = [folder / name for name in ("there", *besides)]
        wait(lambda: all(file.exists() for file in there), "rank 1 never waited")
        slots.stop()
        paused = slots._stop_coordinator._positions
        wait(lambda: len(paused) == slots.world_size, "a rank has not paused")
        (folder / "stopped").touch()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("world_size", "zero_stage"),
    [(2, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 3), (4, 1)))],
)
def test_a_stopped_run_resumes_bit_for_bit(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """Stopped within a workload while ranks are a step apart, all ranks save after one batch.

    The resumed run ends like the uninterrupted one.
    """
    slots = warm_slots(world_size)

    def config(part: str, **where: int) -> Any:
        folder = tmp_path / part
        folder.mkdir(exist_ok=True)
        hparams = {**waiting(folder, **where), "zero_stage": zero_stage}
        return toy_config(
            folder, 11, min_validation_period={"batches": 4}, scheduling_unit=7,
            hyperparameters=hparams,
        )  # fmt: skip

    whole = drive(slots, config("whole"), tmp_path / "whole", persist=True)
    stopping = stop_at_wait(slots, tmp_path / "parts")
    first = drive(slots, config("parts", at_batch=5), tmp_path / "parts", persist=True)
    stopping.join()
    assert 6 <= first.progress.batches_trained < 11
    rest = drive(slots, config("parts"), tmp_path / "parts", persist=True, resume=first)

    expected, resumed = (
        tensors(tmp_path / part / "checkpoints" / "checkpoints" / run.checkpoints[-1])
        for part, run in (("whole", whole), ("parts", rest))
    )
    assert len(expected) > 7
    assert differing(expected, resumed) == []
    for rank in range(world_size):
        seen = [lines(tmp_path / part, "samples", rank) for part in ("whole", "parts")]
        assert seen[0] == seen[1]


def test_a_validation_that_ends_early_leaves_no_trace(warm_slots: Warm, tmp_path: Path) -> None:
    """It has no metrics, and the resumed run repeats it with the same random numbers."""
    slots = warm_slots(2)
    whole = drive(slots, drawing(tmp_path / "whole"), tmp_path / "whole", persist=True)
    stopping = stop_at_wait(slots, tmp_path / "parts")
    config = drawing(tmp_path / "parts", at_evaluation=2)
    first = drive(slots, config, tmp_path / "parts", persist=True)
    stopping.join()
    assert (first.progress.batches_trained, first.progress.validated_at) == (4, None)
    assert len(first.checkpoints) == 1
    config = drawing(tmp_path / "parts")
    rest = drive(slots, config, tmp_path / "parts", persist=True, resume=first)
    assert rest.validation == whole.validation


def test_a_validation_that_one_rank_has_finished_is_finished_by_all(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Without lockstep, one rank may have finished before another is stopped."""
    stopping = stop_at_wait(warm_slots(2), tmp_path, "evaluated-0")
    config = drawing(tmp_path, at_evaluation=2, zero_stage=1)
    run = drive(warm_slots(2), config, tmp_path)
    stopping.join()
    assert (run.progress.batches_trained, run.progress.validated_at) == (4, 4)


def drawing(folder: Path, **hparams: int) -> Any:
    """8 batches; validations of 6 evaluations per rank that draw random numbers."""
    folder.mkdir(exist_ok=True)
    hyperparameters = {**waiting(folder), "zero_stage": 3, "validation_samples": 24, **hparams}
    return toy_config(
        folder, 8, entrypoint="evaluation_trials:Drawing", min_validation_period={"batches": 4},
        hyperparameters=hyperparameters,
    )  # fmt: skip


def test_no_batch_begins_after_a_stop(warm_slots: Warm, tmp_path: Path) -> None:
    """A later workload ends before its first batch."""
    slots = warm_slots(2)
    build(slots, toy_config(tmp_path), tmp_path)
    slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
    slots.stop()
    ended = slots.request(TrainBatches(until=5), Trained)
    assert [(each.batches_trained, each.metrics) for each in ended] == [(0, {})] * 2


@pytest.mark.long
def test_hung_ranks_are_detected_with_their_stacks(warm_server: ForkServer, tmp_path: Path) -> None:
    """After the stall timeout the group ends; the error and the logs have each rank's stack."""
    hparams = {"at_batch": 1, "do": "sleep", "do_rank": 1}
    config = toy_config(tmp_path, hyperparameters=hparams)
    with warm_group(warm_server, 2, log_dir=tmp_path / "logs") as slots:
        build(slots, config, tmp_path)
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
        slots.request(TrainBatches(until=1), Trained, stall_seconds=TIMEOUT_SECONDS)
        with pytest.raises(Stalled, match="no batch has ended for 1 s during train-w") as failure:
            slots.request(TrainBatches(until=2), Trained, stall_seconds=1.0)
    stacks = failure.value.stacks
    assert "in _misbehave" in stacks[1]
    assert "in train_batch" in stacks[0]
    assert "in _misbehave" not in stacks[0]
    for rank, stack in enumerate(stacks):
        assert stack in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
