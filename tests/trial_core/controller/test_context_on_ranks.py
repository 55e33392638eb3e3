"""What a trial gets from its context while it is trained, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import TOY, Driven, drive, lines, toy_config
from trial_core.messages import FinishRunFiles, RunFilesStored
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
TRIALS = TOY.parent / "toy_context"


def slots(world_size: int, **environment: str) -> SlotGroup:
    environment["PYTHONPATH"] = str(TOY)
    return SlotGroup(world_size, working_dir=TRIALS, environment=environment)


def config(folder: Path, batches: int, trial: str, **hparams: Any) -> Any:
    hparams["record"] = str(folder)
    return toy_config(
        folder, batches, entrypoint=f"context_trials:{trial}", hyperparameters=hparams
    )


@pytest.fixture(scope="module")
def two() -> Iterator[SlotGroup]:
    with slots(2) as group:
        yield group


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the event files of a folder say, by tag: (step, value) in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in seen.Scalars(tag)]
        for tag in seen.Tags()["scalars"]
    }


def uploaded(folder: Path, rank: int) -> Path:
    return folder / "checkpoints" / "runs" / "toy-0000beef" / "tensorboard" / f"rank-{rank}"


def test_event_files_are_uploaded_with_the_run(two: SlotGroup, tmp_path: Path) -> None:
    """Every rank's own, and on rank 0 the metrics that the run reported as well."""
    run = drive(two, config(tmp_path, 4, "Measuring"), tmp_path)
    stored = two.request(FinishRunFiles(), RunFilesStored)
    assert [rank.problem for rank in stored] == [None, None]
    for rank in (0, 1):
        seen = scalars(uploaded(tmp_path, rank))
        assert seen["own"] == [(batch, 100 * rank + batch) for batch in range(4)]
        note = (uploaded(tmp_path, rank) / "note.txt").read_text()
        assert note == f"rank {rank} at batch 3"
    first, second = (scalars(uploaded(tmp_path, rank)) for rank in (0, 1))
    assert first["training/loss"] == [(4, pytest.approx(run.training[-1]["loss"]))]
    assert first["validation/loss"] == [(4, pytest.approx(run.validation[-1]["loss"]))]
    assert set(second) == {"own"}


def test_event_files_go_along_with_each_checkpoint(two: SlotGroup, tmp_path: Path) -> None:
    """A run that is killed after a checkpoint has lost no event file from before it."""
    drive(two, config(tmp_path, 3, "Measuring"), tmp_path, persist=True)
    assert [step for step, _ in scalars(uploaded(tmp_path, 1))["own"]] == [0, 1, 2]


def test_a_profilers_trace_is_uploaded_with_the_run(two: SlotGroup, tmp_path: Path) -> None:
    """wait 1, warm up 1, active 2: batches 2 and 3 are in it, one trace a rank."""
    drive(two, config(tmp_path, 6, "Measuring"), tmp_path)
    two.request(FinishRunFiles(), RunFilesStored)
    for rank in (0, 1):
        (trace,) = uploaded(tmp_path, rank).glob(f"rank-{rank}.*.pt.trace.json")
        names = {str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]}
        assert {n for n in names if n.startswith("toy_batch")} == {"toy_batch_2", "toy_batch_3"}


def test_switched_off_nothing_is_uploaded(two: SlotGroup, tmp_path: Path) -> None:
    """The files are in the run's folder on this machine, and nowhere else."""
    drive(two, config(tmp_path, 2, "KeepsItLocal"), tmp_path, persist=True)
    assert two.request(FinishRunFiles(), RunFilesStored) == [RunFilesStored(files=0)] * 2
    assert not uploaded(tmp_path, 0).exists()
    assert set(scalars(tmp_path / "tensorboard" / "rank-0")) == {"own"}


def test_where_training_is(two: SlotGroup, tmp_path: Path) -> None:
    """20 samples, 2 ranks, 2 a micro-batch, 3 of them a batch: 5/3 batches an epoch. Every call of
    train_batch within a batch hears the same."""
    drive(
        two, config(tmp_path, 5, "AsksWhereItIs", train_samples=20, accumulation=3), tmp_path
    )  # fmt: skip
    seen = lines(tmp_path, "where", 1)
    assert all(index == current for index, current, _, _ in seen)
    calls = [[index, start, end] for index, _, start, end in seen]
    assert calls[::3] == calls[1::3] == calls[2::3]
    assert calls[::3] == [
        [0, True, False],
        [1, False, True],
        [2, True, False],
        [3, False, True],
        [4, True, True],
    ]


@pytest.mark.parametrize(
    ("variable", "world_size"),
    [("DET_MANUAL_INIT_DISTRIBUTED", 2), ("TRIALFLOW_MANUAL_INIT_DISTRIBUTED", 1)],
)
def test_a_trial_that_initialises_by_itself(tmp_path: Path, variable: str, world_size: int) -> None:
    """torch.distributed is untouched until the trial sees to it; then everything works."""
    with slots(world_size, **{variable: "1"}) as group:
        run: Driven = drive(group, config(tmp_path, 2, "InitialisesItself"), tmp_path)
    assert run.progress.batches_trained == 2
    for rank in range(world_size):
        was_initialised, everybody = lines(tmp_path, "init", rank)[0]
        assert was_initialised is False
        assert everybody == list(range(world_size))


def test_without_the_variable_it_is_initialised_before(two: SlotGroup, tmp_path: Path) -> None:
    """The usual case, which the variables change."""
    drive(two, config(tmp_path, 1, "InitialisesItself"), tmp_path)
    assert lines(tmp_path, "init", 1)[0] == [True, [0, 1]]
