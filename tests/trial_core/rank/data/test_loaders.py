"""Custom training loaders, and trials that do not take one batch's micro-batches."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset

from tests.support.slots import drive, lines, toy_config
from tests.trial_core.trainer.fits import hooks
from trial_core.errors import CheckpointError, TrialError
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.data.dataloader import DataLoader
from trial_core.rank.data.loaders import Loaders, MicroBatches, build_loaders
from trial_core.schedule.units import EpochLength


@pytest.mark.slots
@pytest.mark.parametrize("trial", ["OwnTrainingLoader", "DeepSpeedsLoader"])
def test_a_custom_loader_repeats_and_has_its_own_epochs(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, trial: str
) -> None:
    """Its length is that of the rank's shard: 16 samples on 2 ranks, 4 batches of 2 per epoch."""
    config = toy_config(
        tmp_path, 8, entrypoint=f"evaluation_trials:{trial}",
        hyperparameters={"train_samples": 16, "record": str(tmp_path)},
    )  # fmt: skip
    drive(warm_slots(2), config, tmp_path)
    recorded = [lines(tmp_path, "samples", rank) for rank in (0, 1)]
    assert [epoch for _, epoch, *_ in recorded[1]] == [0] * 4 + [1] * 4
    for begin in (0, 4):
        seen = [i for rank in recorded for line in rank[begin : begin + 4] for i in line[2:]]
        assert sorted(seen) == list(range(16))


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize(
    "trial", ["evaluation_trials:DeepSpeedsLoaderForBoth", "evaluation_trials:RepeatingLoaders"]
)
def test_a_repeating_loader_has_the_length_of_the_loader_inside(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, trial: str
) -> None:
    """A validation ends with one pass, and training continues in its own: 4 batches an epoch."""
    config = toy_config(
        tmp_path, 8, entrypoint=trial, min_validation_period={"batches": 3},
        hyperparameters={"train_samples": 16, "record": str(tmp_path)},
    )  # fmt: skip
    run = drive(warm_slots(2), config, tmp_path)
    assert [metrics["indices"] for metrics in run.validation] == [list(range(16))] * 3
    recorded = [lines(tmp_path, "samples", rank) for rank in (0, 1)]
    assert [epoch for _, epoch, *_ in recorded[1]] == [0] * 4 + [1] * 4
    for begin in (0, 4):
        seen = [i for rank in recorded for line in rank[begin : begin + 4] for i in line[2:]]
        assert sorted(seen) == list(range(16))
    ended = [each["epoch"] for each in hooks(tmp_path) if each["hook"] == "on_training_epoch_end"]
    assert ended == [0, 1]


@pytest.mark.slots
def test_the_loader_of_a_pipeline_has_epochs_and_ends_a_validation(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """16 samples are 4 batches of 2 micro-batches of 2, and so is a validation."""
    config = toy_config(
        tmp_path, 6, entrypoint="parallel_trials:PipelineWithLoader",
        min_validation_period={"batches": 3},
        hyperparameters={"train_samples": 16, "record": str(tmp_path)},
    )  # fmt: skip
    run = drive(warm_slots(2), config, tmp_path)
    assert [metrics["indices"] for metrics in run.validation] == [list(range(16))] * 2
    trained = lines(tmp_path, "samples", 0)
    assert [epoch for _, epoch, _ in trained] == [0] * 4 + [1] * 2
    seen = [i for *_, drawn in trained[:4] for micro_batch in drawn for i in micro_batch]
    assert sorted(seen) == list(range(16))


@pytest.mark.long
@pytest.mark.slots
def test_evaluate_full_dataset_gets_the_loader_inside_a_repeating_loader(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """8 samples in micro-batches of 2: rank 0's shard of 16."""
    config = toy_config(
        tmp_path, 1, entrypoint="evaluation_trials:RepeatingFullDataset",
        hyperparameters={"train_samples": 16, "record": str(tmp_path)},
    )  # fmt: skip
    (metrics,) = drive(warm_slots(2), config, tmp_path).validation
    assert metrics["micro_batches"] == 4


@pytest.mark.parametrize(("taken", "warnings"), [(3, 0), (6, 1), (0, 1)])
def test_a_wrong_number_of_micro_batches_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, taken: int, warnings: int
) -> None:
    """Epochs are counted by batches, so they would not match the passes over the data."""
    micro_batches = MicroBatches(itertools.count(), 3, lambda *_: 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            list(itertools.islice(micro_batches, taken))
            micro_batches.batch_ended()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
    if warnings:
        assert f"took {taken} micro-batches" in messages[0]
        assert "makes it 3" in messages[0]


def test_a_rank_that_needs_no_data_builds_no_loaders() -> None:
    """The trial's methods are not called there."""

    def build() -> None:
        raise AssertionError("a loader was built on a rank that needs none")

    adapter: Any = SimpleNamespace(
        needs_data=False, training_loader=build, validation_loader=build,
        requires_reproducible_loaders=True, micro_batches_per_batch=1,
        micro_batches_per_evaluation=1, data_parallel_rank=0, data_parallel_size=1,
        evaluates_in_lockstep=False, pads_evaluation=True,
    )  # fmt: skip
    alone: Any = SimpleNamespace(allgather=lambda mine: [mine], get_rank=lambda: 0)
    loaders = build_loaders(adapter, alone, seed=0)
    loaders.begin()
    assert loaders.training is None
    assert loaders.validation.begin() is None


@pytest.mark.parametrize(
    ("samples", "drop_last", "expected"),
    [
        (48, False, ""),
        (
            24,
            False,
            "a pass over the training data has 24 samples, fewer than a batch of 48: ",
        ),
        (
            30,
            False,
            "a pass over the training data has 30 samples, fewer than a batch of 48: ",
        ),
        (100, False, "the last micro-batch of a pass over the training data has 4 samples, "),
        (100, True, ""),
    ],
)
def test_short_batches_are_told(samples: int, drop_last: bool, expected: str) -> None:
    """On two ranks with 24 samples each in a batch: with the numbers."""
    (warning, *others) = [*_on_two_ranks(samples, drop_last).warnings, ""]
    assert warning.startswith(expected)
    assert bool(warning) == bool(expected)
    assert ("hold fewer" in warning) == (samples == 30)
    assert not any(others)


def test_a_set_of_fewer_samples_than_ranks_is_refused() -> None:
    """A rank would train on another one's sample."""
    with pytest.raises(TrialError, match="has 1 sample, and there are 2 ranks"):
        _on_two_ranks(1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


LISTS = [[0], [1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        (DataLoader(range(100), batch_size=24), [24, 24, 4, 24, 24]),
        (DataLoader(range(100), batch_size=24, drop_last=True), [24] * 5),
        (DataLoader(Stream(), batch_size=24), [24] * 5),
        (DataLoader(range(6), batch_sampler=LISTS), [1, 2, 3, 1, 2]),
        ([[0, 1], torch.zeros(5)], [0, 5, 0, 5, 0]),
    ],
)
def test_samples_are_those_of_the_micro_batches(data: Any, counts: list[int]) -> None:
    """Of the first of two ranks: by their places, else as the trial counts, which may not."""
    loaders = _on_two_ranks(0, data=data)
    loaders.begin()
    taken = loaders.training
    assert taken is not None
    totals = [taken.samples for _ in itertools.islice(taken, 5)]
    assert totals == [*itertools.accumulate(counts)]


SAVED = {"drawn": 12, "per_batch": 1, "ranks": 2, "pass": 10, "first_epoch": 0, "loader": None}
"""Of 240 samples, in 12 batches of 48: two epochs, and 96 samples of the next one."""


@pytest.mark.parametrize(
    ("samples", "told", "end", "sample"),
    [
        (240, "", 15, 96),
        (480, "training data: batches of an epoch 5 -> 10, from this epoch on", 20, 96),
        (120, "training data: batches of an epoch 5 -> 2.5, from this epoch on", 13, 96),
        # Trains on the batch that ends the epoch.
        (48, "training data: batches of an epoch 5 -> 1, from this epoch on", 13, 0),
    ],
)
def test_data_of_another_length(samples: int, told: str, end: int, sample: int) -> None:
    """The third epoch continues at its sample. Earlier ones are not counted in the new length."""
    loaders = _on_two_ranks(samples)
    assert loaders.count_on(EpochLength(10, 2), 12, 48, SAVED) == told
    loaders.begin(SAVED)
    assert loaders.epoch is not None
    assert loaders.training is not None
    assert (loaders.epoch.epoch_of(12), loaders.epoch.batches_until(3)) == (2, end)
    assert next(loaders.training)[0] == sample


@pytest.mark.parametrize("recorded", [24, None])
@pytest.mark.parametrize(("now", "batches"), [(48, 2), (48, 3), (24, 3), (0, 3)])
def test_a_batch_sampler_has_the_trials_size(recorded: int | None, now: int, batches: int) -> None:
    """If it tells one; a checkpoint need not have recorded it. 240 samples, by 24 until now."""
    size = (now or 24) // 2
    data = DataLoader(range(240), batch_sampler=BatchSampler(range(240), size, False))
    loaders = _on_two_ranks(0, data=data, batch_samples=now)
    count = functools.partial(loaders.count_on, EpochLength(20, 2), batches, recorded)
    saved = {**SAVED, "drawn": batches, "pass": 20}
    if (now, batches) == (48, 3):
        with pytest.raises(CheckpointError, match=r"a batch had 24 samples .* has 48 now"):
            count(saved, of_trial_then=24)
        return
    told = count(saved, of_trial_then=24)
    assert ("batch size 24 -> 48" in told) is (now == 48)
    loaders.begin(saved)
    assert loaders.training is not None
    assert next(loaders.training)[0] == 24 * batches


def test_sizes_of_a_loader_and_of_a_trial_are_not_compared() -> None:
    """The trial names 96 samples a batch, and the loader has always had 48."""
    loaders = _on_two_ranks(240, batch_samples=96)
    assert loaders.count_on(EpochLength(10, 2), 12, None, SAVED, of_trial_then=96) == ""


def _on_two_ranks(
    samples: int, drop_last: bool = False, data: Any = None, batch_samples: int = 0
) -> Loaders:
    if data is None:
        data = DataLoader(range(samples), batch_size=24, drop_last=drop_last)
    adapter: Any = SimpleNamespace(
        needs_data=True, training_loader=lambda: data,
        validation_loader=lambda: DataLoader(range(48), batch_size=24),
        requires_reproducible_loaders=False, micro_batches_per_batch=1,
        micro_batches_per_evaluation=1, data_parallel_rank=0, data_parallel_size=2,
        evaluates_in_lockstep=False, pads_evaluation=True,
        samples_in=lambda batch: len(batch) if torch.is_tensor(batch) else 0,
        batch_samples=batch_samples,
    )  # fmt: skip
    ranks: Any = SimpleNamespace(
        allgather=lambda mine: [mine, mine], get_rank=lambda: 0, get_size=lambda: 2
    )
    return build_loaders(adapter, ranks, seed=0, compares_data=False)
