"""Pipeline parallelism, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
PIPELINE = "parallel_trials:PipelineTrial"


def config(folder: Path, batches: int = 2, entrypoint: str = PIPELINE, **hparams: Any) -> Any:
    hparams = {"record": str(folder), **hparams}
    return toy_config(folder, batches, entrypoint=entrypoint, hyperparameters=hparams)


@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (4, 2), (4, 4)])
def test_a_batch_is_one_call_and_its_metrics_are_the_last_stages(
    warm_slots: Warm, tmp_path: Path, world_size: int, stages: int
) -> None:
    """Each rank calls train_batch once a batch; stages between the first and the last get no
    loader; only the last one's number is reported, not the mean over stages."""
    hparams = {"stages": stages, "accumulation": 3}
    run = drive(warm_slots(world_size), config(tmp_path, 4, **hparams), tmp_path)
    assert run.training[-1]["stage"] == run.validation[-1]["stage"] == stages - 1
    for rank in range(world_size):
        recorded = lines(tmp_path, "samples", rank)
        assert [line[0] for line in recorded] == [0, 1, 2, 3]
        copies = world_size // stages
        reads = rank // copies in (0, stages - 1)
        assert [len(line[2]) for line in recorded] == [3 if reads else 0] * 4


def test_first_and_last_stage_see_the_same_samples_and_copies_see_others(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Inputs and labels are read by different ranks, and belong together; together the two copies
    of the pipeline see each sample once in an epoch."""
    drive(warm_slots(4), config(tmp_path, 8, train_samples=64, stages=2), tmp_path)
    drawn = [[line[2] for line in lines(tmp_path, "samples", rank)] for rank in range(4)]
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    epoch = [i for copy in drawn[:2] for batch in copy for micro in batch for i in micro]
    assert sorted(epoch) == list(range(64))


def test_inputs_and_labels_belong_together_though_loading_draws(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """The first stage's dropout moves its generators on, the last stage has none; the noise of a
    micro-batch is the same on both, in training and validation, and another for each."""
    experiment = config(tmp_path, 3, "parallel_trials:NoisyPipeline")
    drive(warm_slots(2), experiment, tmp_path)
    first, last = (lines(tmp_path, "samples", rank) for rank in (0, 1))
    assert first == last
    assert {line[0] for line in first} == {0, 1, 2, "validation"}
    noise = [micro[0] % 1 for line in first[:3] for micro in line[2]]
    assert len(set(noise)) == len(noise)


def test_a_pipeline_with_noise_resumes_bit_identically(warm_slots: Warm, tmp_path: Path) -> None:
    """What is drawn for a micro-batch depends on its place alone."""
    assert_resuming_is_bit_identical(warm_slots(2), tmp_path, "parallel_trials:NoisyPipeline")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_pipeline_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Two stages, alone and twice over, with accumulation, shuffling and dropout."""
    assert_resuming_is_bit_identical(warm_slots(world_size), tmp_path, PIPELINE, accumulation=3)


@pytest.mark.parametrize("trial", ["PipelineTrial", "UnsizedPipeline"])
@pytest.mark.parametrize(("world_size", "counted"), [(2, 20), (4, 16)])
def test_validation_takes_whole_groups(
    warm_slots: Warm, tmp_path: Path, trial: str, world_size: int, counted: int
) -> None:
    """22 samples are 11 micro-batches. One pipeline makes 5 groups of 2 of them, two pipelines 2
    each: their losses are averaged by DeepSpeed, so a third group of one alone cannot count. The
    loader may have a length or not."""
    entrypoint = f"parallel_trials:{trial}"
    run = drive(
        warm_slots(world_size), config(tmp_path, 1, entrypoint, validation_samples=22), tmp_path
    )
    assert run.validation[-1]["indices"] == list(range(counted))
