"""Pipeline parallelism, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
PIPELINE = "parallel_trials:PipelineTrial"


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def config(folder: Path, batches: int = 2, entrypoint: str = PIPELINE, **hparams: Any) -> Any:
    hparams = {"record": str(folder), **hparams}
    return toy_config(folder, batches, entrypoint=entrypoint, hyperparameters=hparams)


@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), long(4, 2), long(4, 4)])
def test_a_batch_is_one_call_and_only_the_last_stage_reports(
    warm_slots: Warm, tmp_path: Path, world_size: int, stages: int
) -> None:
    """Each rank calls train_batch once a batch, middle stages get no loader, and metrics are not
    averaged over stages."""
    hparams = {"stages": stages, "accumulation": 3}
    run = drive(warm_slots(world_size), config(tmp_path, 4, **hparams), tmp_path)
    assert run.training[-1]["stage"] == run.validation[-1]["stage"] == stages - 1
    for rank in range(world_size):
        recorded = lines(tmp_path, "samples", rank)
        assert [line[0] for line in recorded] == [0, 1, 2, 3]
        copies = world_size // stages
        has_loader = rank // copies in (0, stages - 1)
        assert [len(line[2]) for line in recorded] == [3 if has_loader else 0] * 4


@pytest.mark.long
def test_stages_of_a_pipeline_see_the_same_samples(warm_slots: Warm, tmp_path: Path) -> None:
    """First and last stage read the same samples; two pipelines together see each sample of an
    epoch once."""
    drive(warm_slots(4), config(tmp_path, 8, train_samples=64, stages=2), tmp_path)
    drawn = [[line[2] for line in lines(tmp_path, "samples", rank)] for rank in range(4)]
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    epoch = [i for copy in drawn[:2] for batch in copy for micro in batch for i in micro]
    assert sorted(epoch) == list(range(64))


def test_stages_draw_the_same_random_numbers_while_loading(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """A micro-batch has the same noise on both stages, although only the first has dropout; two
    micro-batches have different noise."""
    experiment = config(tmp_path, 3, "parallel_trials:NoisyPipeline")
    drive(warm_slots(2), experiment, tmp_path)
    first, last = (lines(tmp_path, "samples", rank) for rank in (0, 1))
    assert first == last
    assert {line[0] for line in first} == {0, 1, 2, "validation"}
    noise = [micro[0] % 1 for line in first[:3] for micro in line[2]]
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize(
    ("world_size", "trial", "hparams"),
    [
        (2, "PipelineTrial", {"accumulation": 3}),
        long(4, "PipelineTrial", {"accumulation": 3}),
        long(2, "NoisyPipeline", {}),
    ],
)
def test_a_pipeline_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str, hparams: dict[str, Any]
) -> None:
    """Two stages, with accumulation, shuffling and dropout."""
    slots = warm_slots(world_size)
    assert_resuming_is_bit_identical(slots, tmp_path, f"parallel_trials:{trial}", **hparams)


@pytest.mark.parametrize(
    ("trial", "world_size", "counted"),
    [
        ("PipelineTrial", 2, 20),
        long("PipelineTrial", 4, 16),
        long("UnsizedPipeline", 2, 20),
        long("UnsizedPipeline", 4, 16),
    ],
)
def test_validation_takes_whole_groups(
    warm_slots: Warm, tmp_path: Path, trial: str, world_size: int, counted: int
) -> None:
    """Of 11 micro-batches one pipeline takes 5 groups of 2, and two pipelines take 2 each.

    DeepSpeed averages the pipelines' losses, so a group that only one pipeline has cannot count.
    """
    entrypoint = f"parallel_trials:{trial}"
    run = drive(
        warm_slots(world_size), config(tmp_path, 1, entrypoint, validation_samples=22), tmp_path
    )
    assert run.validation[-1]["indices"] == list(range(counted))
