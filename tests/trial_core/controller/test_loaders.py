"""Training loaders: a user's own, and trials that take other than one batch's micro-batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import drive, lines, toy_config
from trial_core.controller.loaders import MicroBatches
from trial_core.slots.group import SlotGroup


@pytest.mark.slots
@pytest.mark.parametrize("trial", ["OwnTrainingLoader", "DeepSpeedsLoader"])
def test_an_epoch_of_a_loader_that_shards_by_itself(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, trial: str
) -> None:
    """16 samples, 2 ranks, micro-batches of 2: an epoch is 4 batches, and the loader starts over.
    Its length is that of the rank's shard, not of the whole set."""
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


@pytest.mark.parametrize(("taken", "warnings"), [(3, 0), (6, 1), (0, 1)])
def test_taking_other_than_one_batchs_micro_batches_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, taken: int, warnings: int
) -> None:
    """Epochs are counted by one batch's for each batch, so theirs would end at another place."""
    micro_batches = MicroBatches(itertools.count(), per_batch=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            list(itertools.islice(micro_batches, taken))
            micro_batches.batch_ended()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
    if warnings:
        assert f"took {taken} micro-batches" in messages[0]
        assert "makes it 3" in messages[0]
