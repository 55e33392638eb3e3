"""Another size of batches: 240 samples, 24 in a batch up to the end of the first epoch, then 32.

On 2 ranks such an epoch has 15 micro-batches, so it ends in the middle of its 8th batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.resuming.studies import seen_in
from tests.resuming.test_resuming import in_batches
from tests.support.slots import Driven, drive, toy_config
from trial_core.processes.slots.slot_group import SlotGroup


@pytest.mark.slots
@pytest.mark.parametrize(
    ("trial", "hparams"),
    [
        ("Torch", {}),
        pytest.param("Deep", {"zero_stage": 2, "micro_batch": 4}, marks=pytest.mark.long),
    ],
)
def test_each_sample_comes_once_in_an_epoch(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, trial: str, hparams: dict[str, Any]
) -> None:
    """Epochs are counted on, and a resume in a later epoch with nothing changed is bit for bit."""

    def run(name: str, size: int, batches: int, resume: Driven | None = None) -> Driven:
        config = toy_config(
            tmp_path, batches, entrypoint=f"changed_trials:{trial}",
            hyperparameters={
                "global_batch_size": size, "samples": 240, "record": str(tmp_path / name), **hparams
            },
        )  # fmt: skip
        (tmp_path / name).mkdir(exist_ok=True)
        return drive(warm_slots(2), config, tmp_path / name, resume=resume, persist=True)

    first = run("first", 24, 10)
    run("whole", 32, 25, first)
    parts = run("parts", 32, 20, first)
    assert parts.epoch is not None
    assert (parts.epoch.first_epoch, parts.epoch.first_batch) == (1, 10)
    run("parts", 32, 25, parts)

    whole = seen_in(tmp_path / "whole", 2)
    assert whole.values("batch") == [*range(10, 25)]
    assert whole.values("epoch") == [1] * 8 + [2] * 7
    of_batches = in_batches(whole)
    # The 8th batch has the last 16 samples of its epoch, and 16 of the next one.
    for part, times in ((of_batches[:7], 1), (of_batches[8:], 1), (of_batches, 2)):
        count = Counter(sample for batch in part for sample in batch)
        assert {*count.values()} == {times}
    assert len(count) == 240
    assert seen_in(tmp_path / "parts", 2).batches == whole.batches


@pytest.mark.long
@pytest.mark.slots
def test_data_of_another_length_end_their_epochs(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """After one and a half epochs of 10 batches, the second one has 20, and so has the third."""

    def run(name: str, samples: int, batches: int, resume: Driven | None = None) -> Driven:
        config = toy_config(
            tmp_path, batches, entrypoint="changed_trials:Torch",
            hyperparameters={
                "global_batch_size": 24, "samples": samples, "record": str(tmp_path / name)
            },
        )  # fmt: skip
        (tmp_path / name).mkdir(exist_ok=True)
        return drive(warm_slots(2), config, tmp_path / name, resume=resume, persist=True)

    first = run("first", 240, 15)
    run("whole", 480, 52, first)
    run("parts", 480, 40, run("parts", 480, 25, first))
    whole, parts = seen_in(tmp_path / "whole", 2), seen_in(tmp_path / "parts", 2)
    assert whole.values("epoch") == [1] * 15 + [2] * 20 + [3] * 2
    assert {*Counter(itertools.chain(*in_batches(whole)[15:35])).values()} == {1}
    assert parts.batches == [of_rank[:25] for of_rank in whole.batches]
