"""Where the training data continues after a restart, with every kind of loader."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.support.slots import ONE_TWO_FOUR, Driven, drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.errors import TrialError
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch import DataLoader
from trial_core.rank.data.loaders import Loaders, build_loaders

Warm = Callable[[int], SlotGroup]
DRAWN = {"drawn": 2, "per_batch": 1, "ranks": 1, "pass": 3}


def long(trial: str, **hparams: Any) -> Any:
    return pytest.param(trial, hparams, marks=pytest.mark.long)


@pytest.mark.slots
@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize(
    ("trial", "hparams"),
    [
        # In the first pass; in a later one (2 or 4 ranks); at the end of a pass (2 or 4 ranks).
        long("Torchdata", train_samples=50, accumulation=2),
        long("Torchdata", train_samples=12),
        long("Torchdata", train_samples=16),
        ("Torchdata", {"train_samples": 20, "workers": 2}),  # its workers load ahead
        long("Stateful"),  # in the second pass
        long("Stateful", pass_length=4),  # at the end of a pass
        long("TwoPerBatch"),
        ("TwoPerBatch", {"unevenly": True}),
    ],
)
def test_resuming_is_bit_identical(
    warm_slots: Warm, tmp_path: Path, ranks: int, trial: str, hparams: dict[str, Any]
) -> None:
    """4 + 5 batches equal 9: the same micro-batches, augmentations and weights."""
    if trial == "Torchdata":
        pytest.importorskip("torchdata")
    assert_resuming_is_bit_identical(
        warm_slots(ranks), tmp_path, f"loader_trials:{trial}", **hparams
    )


@pytest.mark.slots
def test_on_checkpoint_load_start_may_change_any_part_of_the_state(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Here it restarts the data, reseeds torch, and removes the callbacks' states."""

    def run(batches: int, resume: Driven | None = None) -> Driven:
        config = toy_config(
            tmp_path, batches, entrypoint="rewinding_trials:RewindTrial",
            hyperparameters={"train_samples": 50, "record": str(tmp_path)},
        )  # fmt: skip
        return drive(warm_slots(2), config, tmp_path, resume=resume, persist=True)

    run(7, resume=run(4))
    for rank in (0, 1):
        samples = [line[2:] for line in lines(tmp_path, "samples", rank)]
        assert samples[4:] == samples[:3]
        assert lines(tmp_path, "state", rank)[4:] == [[7, False]] * 3


@pytest.mark.slots
def test_data_in_another_order_are_told(warm_slots: Warm, tmp_path: Path) -> None:
    """Of another rank, and of a checkpoint although neither experiment nor code has changed."""

    def warnings(
        of_rank: Sequence[Sequence[int]], resume: Driven | None = None, **kept: Any
    ) -> Any:
        for rank, names in enumerate(of_rank):
            (tmp_path / f"names-{rank}").write_text(" ".join(map(str, names)))
        config = toy_config(
            tmp_path, 2 if resume is None else 3, entrypoint="loader_trials:ByName",
            hyperparameters={"train_samples": 40, "record": str(tmp_path)}, **kept,
        )  # fmt: skip
        run = drive(
            warm_slots(2), config, tmp_path, resume=resume, persist=resume is None, compares=False
        )
        return run, run.warnings

    ordered, other = range(40), range(39, -1, -1)
    run, told = warnings([ordered, ordered])
    assert told == []
    assert warnings([ordered, ordered], run)[1] == []
    (of_checkpoint,) = warnings([other, other], run)[1]
    assert "the training data are not those of the checkpoint: Listed.names" in of_checkpoint
    (of_ranks,) = warnings([ordered, other], run)[1]
    assert "not the same on all ranks: rank 0 has Listed.names" in of_ranks
    assert warnings([range(30), range(30)], run)[1] != []
    assert warnings([other, ordered], run, reproducibility={"compare_data": False})[1] == []


# --------------------------------------------------------------------------- on a single rank


class OneRank:
    """A DistributedContext of one rank, with `others` that do the same."""

    def __init__(self, others: int = 0) -> None:
        self.size = 1 + others

    def allgather(self, mine: Any) -> list[Any]:
        return [mine] * self.size

    def get_rank(self) -> int:
        return 0

    def get_size(self) -> int:
        return self.size


def loaders(
    loader: Any,
    saved: dict[str, Any] | None = None,
    per_batch: int = 1,
    others: int = 0,
) -> Loaders:
    adapter: Any = SimpleNamespace(
        training_loader=lambda: loader,
        validation_loader=lambda: [0],
        needs_data=True,
        samples_in=lambda batch: 0,
        requires_reproducible_loaders=False,
        micro_batches_per_batch=per_batch,
        micro_batches_per_evaluation=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        evaluates_in_lockstep=False,
        pads_evaluation=True,
    )
    ranks: Any = OneRank(others)
    built = build_loaders(adapter, ranks, seed=0)
    built.begin(saved)
    return built


def take(data: Loaders, count: int) -> list[Any]:
    assert data.training is not None
    return list(itertools.islice(data.training, count))


class Counting:
    """A loader of 0 … length-1 that saves its state."""

    def __init__(self, length: int) -> None:
        self.length, self.next = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_a_stateful_loader_resumes_anywhere(length: int, before: int, between: int) -> None:
    """Saving and restoring twice at any place, also at a pass's end, changes nothing."""
    first = loaders(Counting(length))
    seen = take(first, before)
    second = loaders(Counting(length), saved=first.state_dict())
    seen += take(second, between)
    third = loaders(Counting(length), saved=second.state_dict())
    seen += take(third, 7)
    assert seen == [i % length for i in range(before + between + 7)]


def test_a_state_is_the_loaded_one_until_a_micro_batch_is_taken() -> None:
    """A validation after a resume saves again. litdata's loader would then skip a worker."""

    class Advancing(Counting):
        def load_state_dict(self, state: dict[str, int]) -> None:
            state["next"] += 1  # as litdata's, changes the state that it got
            self.next = state["next"] - 1

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next + (0 if self.is_begun else 1)}

        is_begun = False

        def __iter__(self) -> Iterator[int]:
            self.is_begun = True
            yield from super().__iter__()

    first = loaders(Counting(9))
    take(first, 3)
    again = loaders(Advancing(9), saved=first.state_dict())
    assert take(loaders(Counting(9), saved=again.state_dict()), 2) == [3, 4]


class LikeLitdata(Counting):
    """Loads and saves as litdata's loader with workers, whose epoch is in two places."""

    __module__ = "litdata.streaming.dataloader"
    num_workers = 2

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.current_epoch = 1
        self.dataset = SimpleNamespace(current_epoch=1, _elastic_drop_first=None)

    def state_dict(self) -> dict[str, int]:
        epochs = {"current_epoch": self.current_epoch, "dataset": self.dataset.current_epoch}
        return {**super().state_dict(), **epochs, "num_workers": self.num_workers}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.current_epoch = state["current_epoch"]
        if state["num_workers"] != self.num_workers:
            self.dataset._elastic_drop_first = 8


def saved_by_litdata(workers: int) -> dict[str, Any]:
    """A state in the third epoch."""
    state = {"next": 2, "current_epoch": 3, "dataset": 3, "num_workers": workers}
    return {**DRAWN, "loader": state}


def test_litdatas_loader_keeps_its_epoch_in_the_second_resume() -> None:
    """With workers, its dataset in this process does not load the epoch."""
    resumed = loaders(LikeLitdata(9), saved_by_litdata(workers=2))
    take(resumed, 1)
    state = resumed.state_dict()
    assert state is not None
    assert (state["loader"]["current_epoch"], state["loader"]["dataset"]) == (3, 3)


def test_litdatas_loader_with_workers_cannot_divide_a_pass_anew() -> None:
    """The next state would be wrong; without workers it is right."""
    with pytest.raises(TrialError, match=r"LikeLitdata of litdata has num_workers=2 and a state"):
        loaders(LikeLitdata(9), saved_by_litdata(workers=1))
    alone = LikeLitdata(9)
    alone.num_workers = 0
    assert take(loaders(alone, saved_by_litdata(workers=1)), 2) == [2, 3]


def test_ranks_of_one_model_load_with_the_same_random_numbers_after_a_restart() -> None:
    """Random numbers depend on a micro-batch's position."""

    class Random(Counting):
        def __iter__(self) -> Iterator[Any]:
            return ((i, torch.rand(1).item()) for i in super().__iter__())

    straight = take(loaders(Random(4), others=1), 9)
    first = loaders(Random(4), others=1)
    take(first, 5)
    torch.rand(3)  # drawn by a model
    assert take(loaders(Random(4), first.state_dict(), others=1), 4) == straight[5:]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_drawn_micro_batches_are_skipped(draws: list[int]) -> None:
    """Training continues after the last drawn one, however many each batch took."""
    dataset: Any = torch.arange(40)
    straight = take(loaders(DataLoader(dataset, shuffle=True)), sum(draws) + 5)
    first = loaders(DataLoader(dataset, shuffle=True), per_batch=2)
    for count in draws:
        take(first, count)
    resumed = loaders(DataLoader(dataset, shuffle=True), first.state_dict(), per_batch=2)
    assert take(resumed, 5) == straight[sum(draws) :]


def test_another_number_of_micro_batches_per_batch_is_accounted_for() -> None:
    """6 micro-batches at 2 per batch are 3 batches, which are 12 micro-batches at 4 per batch."""
    dataset: Any = torch.arange(40)
    first = loaders(DataLoader(dataset), per_batch=2)
    take(first, 6)
    resumed = loaders(DataLoader(dataset), first.state_dict(), per_batch=4)
    assert take(resumed, 1) == [torch.tensor([12])]


def test_the_state_of_an_unused_loader_is_not_read() -> None:
    """torchdata's loader would begin a pass, and draw random numbers."""

    class Untouched(Counting):
        def state_dict(self) -> dict[str, int]:
            raise AssertionError("read before its first micro-batch")

    state = loaders(Untouched(3)).state_dict()
    assert state is not None
    assert (state["drawn"], state["loader"]) == (0, None)


@pytest.mark.parametrize(
    ("loader", "saved", "warning"),
    [
        ([0, 1, 2], {**DRAWN, "loader": None}, "has no state_dict"),
        ([0, 1, 2], {**DRAWN, "loader": {"next": 2}}, "has no state_dict"),
        (Counting(3), {**DRAWN, "loader": None}, "holds no state of it"),
    ],
)
def test_a_loader_that_restarts_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, loader: Any, saved: dict[str, Any], warning: str
) -> None:
    """The warning says why it restarts at its first micro-batch."""
    with caplog.at_level(logging.WARNING):
        assert take(loaders(loader, saved), 6) == [0, 1, 2, 0, 1, 2]
    (message,) = [record.getMessage() for record in caplog.records]
    assert warning in message
    assert "although 2 have been trained on" in message


def test_a_new_run_does_not_warn_of_its_loader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With or without state."""
    with caplog.at_level(logging.WARNING):
        take(loaders([0, 1]), 3)
        take(loaders(Counting(2)), 3)
    assert caplog.records == []


def test_a_stateful_loader_without_micro_batches_is_an_error() -> None:
    """The rest of a pass may be empty, but not a whole pass."""
    with pytest.raises(TrialError, match="yielded nothing in a whole pass"):
        take(loaders(Counting(0), {**DRAWN, "loader": {"next": 0}}), 1)
