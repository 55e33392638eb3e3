"""A trial's context during training, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import listening_beyond_loopback
from tests.support.slots import ONE_TWO_FOUR, TOY, Driven, OwnSlots, drive, lines, toy_config
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.trainer.entrypoint import initialises_torch_distributed

Warm = Callable[[int], SlotGroup]
RANKS = pytest.mark.parametrize("world_size", ONE_TWO_FOUR)


def config(folder: Path, batches: int, trial: str, **hparams: Any) -> Any:
    hparams["record"] = str(folder)
    return toy_config(
        folder, batches, entrypoint=f"context_use_trials:{trial}", hyperparameters=hparams
    )


@pytest.mark.slots
@pytest.mark.parametrize(
    ("world_size", "starts", "ends"),
    [
        pytest.param(1, [0, 5], [4], marks=pytest.mark.long),
        (2, [0, 3, 5, 7], [2, 4, 6]),
        pytest.param(4, [0, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], marks=pytest.mark.long),
    ],
)
def test_the_context_knows_the_batch_and_the_epochs_bounds(
    warm_slots: Warm, tmp_path: Path, world_size: int, starts: list[int], ends: list[int]
) -> None:
    """The same in every call of train_batch of a batch, on every rank, and after a restart.

    An epoch has 14 micro-batches, a batch 3 per rank: 14/3, 7/3 or 7/6 batches per epoch.
    """
    hparams = {"train_samples": 28, "accumulation": 3}
    slots = warm_slots(world_size)
    first = drive(slots, config(tmp_path, 5, "RecordsPosition", **hparams), tmp_path, persist=True)
    drive(slots, config(tmp_path, 8, "RecordsPosition", **hparams), tmp_path, resume=first)
    for rank in range(world_size):
        seen = lines(tmp_path, "where", rank)
        assert seen[::3] == seen[1::3] == seen[2::3]
        assert seen[::3] == [[i, i, i in starts, i in ends] for i in range(8)]


@pytest.mark.slots
@RANKS
def test_the_distributed_context_on_a_drivers_ranks(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """All ranks are on one machine; collectives give the values of all, or of rank 0."""
    drive(warm_slots(world_size), config(tmp_path, 2, "RecordsRanks"), tmp_path)
    for rank in range(world_size):
        answers = lines(tmp_path, "ranks", rank)
        assert len(answers) == 2
        for batch, seen in enumerate(answers):
            expected = [{"rank": each, "batch": batch} for each in range(world_size)]
            assert seen["who"] == [rank, world_size, rank, 1]
            assert seen["attributes"] == [rank, world_size, rank, world_size, 0, 1]
            assert seen["allgather"] == seen["allgather_local"] == expected
            gathered = expected if rank == 0 else None
            assert seen["gather"] == seen["gather_local"] == gathered
            assert seen["broadcast"] == seen["broadcast_local"] == expected[0]


@pytest.mark.slots
@RANKS
def test_nested_micro_batches_are_moved(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """to_device keeps containers, converts arrays, and warns once of a type that it cannot move."""
    slots = warm_slots(world_size)
    logs = [slots.log_dir / f"rank-{rank}.log" for rank in range(world_size)]
    before = [log.stat().st_size for log in logs]
    drive(slots, config(tmp_path, 3, "NestedBatches"), tmp_path)
    for rank, log in enumerate(logs):
        seen = lines(tmp_path, "moved", rank)
        trained = lines(tmp_path, "samples", rank)
        assert [each["index"] for each in seen] == [line[2:] for line in trained]
        assert len(seen) == 3
        for each in seen:
            assert each["kinds"] == ["dict", "list", "tuple"]
            assert each["devices"] == [each["own"]] * 3
        text = log.read_bytes()[before[rank] :].decode()
        assert text.count("to_device leaves objects of type Label where they are") == 1


@pytest.mark.slots
def test_a_trial_may_name_its_context_class(warm_slots: Warm, tmp_path: Path) -> None:
    """trial_context_class: every rank gets an object of that class."""
    drive(warm_slots(2), config(tmp_path, 2, "CustomContext"), tmp_path)
    assert [lines(tmp_path, "middle", rank) for rank in (0, 1)] == [[0.5, 0.5]] * 2


@pytest.mark.slots
def test_get_stop_requested_answers_for_this_rank_alone(warm_slots: Warm, tmp_path: Path) -> None:
    """Rank 1 requests a stop in batch 1: it is True there, and False on rank 0.

    Both ranks end and save after the same batch: this one or the next.
    """
    asks = {"do": "stop", "at_batch": 1, "do_rank": 1, "record": str(tmp_path)}
    experiment = toy_config(
        tmp_path, 8, entrypoint="context_use_trials:RecordsStopRequests", scheduling_unit=8,
        hyperparameters=asks,
    )  # fmt: skip
    run = drive(warm_slots(2), experiment, tmp_path)
    reached = run.progress.batches_trained
    assert reached in (2, 3)
    assert run.stages == ["train [0→8]", f"checkpoint @{reached}"]
    heard = [lines(tmp_path, "stop", rank) for rank in (0, 1)]
    assert heard == [[False] * reached, [False, True, True][:reached]]


@pytest.mark.slots
@pytest.mark.parametrize(
    ("variable", "world_size"),
    [
        pytest.param("TRIALFLOW_MANUAL_INIT_DISTRIBUTED", 1, marks=pytest.mark.long),
        pytest.param("DET_MANUAL_INIT_DISTRIBUTED", 2, marks=pytest.mark.long),
        pytest.param("TRIALFLOW_MANUAL_INIT_DISTRIBUTED", 4, marks=pytest.mark.long),
    ],
)
def test_a_trial_may_initialise_torch_distributed(
    tmp_path: Path, variable: str, world_size: int
) -> None:
    """It is not initialised before, and everything works afterwards."""
    with OwnSlots(world_size, working_dir=TOY, environment={variable: "1"}) as group:
        run: Driven = drive(group, config(tmp_path, 2, "InitialisesDistributed"), tmp_path)
        assert listening_beyond_loopback(group.pids) == []
    assert run.progress.batches_trained == 2
    for rank in range(world_size):
        assert lines(tmp_path, "init", rank)[0] == [False, list(range(world_size))]


@pytest.mark.slots
@RANKS
def test_torch_distributed_is_initialised_before_the_trial(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Unless one of the variables is set. Other machines cannot connect to any rank."""
    slots = warm_slots(world_size)
    drive(slots, config(tmp_path, 1, "InitialisesDistributed"), tmp_path)
    assert listening_beyond_loopback(slots.pids) == []
    for rank in range(world_size):
        assert lines(tmp_path, "init", rank)[0] == [True, list(range(world_size))]


@pytest.mark.parametrize(
    "variable", ["DET_MANUAL_INIT_DISTRIBUTED", "TRIALFLOW_MANUAL_INIT_DISTRIBUTED"]
)
def test_both_names_mean_the_same(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """The reference's variable and ours: any value but a negative one switches it on."""
    for value in ("1", "true", "True", "yes", "on", "2"):
        monkeypatch.setenv(variable, value)
        assert initialises_torch_distributed(), value
    for value in ("", " ", "0", "false", "False", "no"):
        monkeypatch.setenv(variable, value)
        assert not initialises_torch_distributed(), value
