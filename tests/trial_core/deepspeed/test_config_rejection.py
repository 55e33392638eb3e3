"""What a user is told whose DeepSpeed config does not fit the ranks."""

from __future__ import annotations

import pytest

from trial_core.deepspeed.config_rejection import rejection

UNEQUAL = (
    "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
    "gradient_acc_step * world_size "
)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        pytest.param(
            f"{UNEQUAL}48 != 9 * 1 * 5",
            "the DeepSpeed config's train_batch_size is 48, but 5 data-parallel ranks train 45 "
            "samples a batch: 9 (micro-batch) x 1 (gradient accumulation) each. train_batch_size "
            "counts the samples of all ranks. Choose one that 5 divides, or a "
            "resources.slots_per_trial that divides 48",
            id="not divisible",
        ),
        pytest.param(
            f"{UNEQUAL}48 != 4 * 3 * 2",
            "Correct one of train_batch_size, train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps, or leave one out",
            id="three numbers that disagree",
        ),
        pytest.param(
            "Micro batch size per gpu: 0 has to be greater than 0",
            "train_batch_size is too small: the micro-batch of a rank has no sample. ",
            id="more ranks than samples",
        ),
        pytest.param(
            "Gradient accumulation steps: 0 has to be greater than 0",
            "train_batch_size is too small: the batch has no micro-batch. ",
            id="larger micro-batches than batches",
        ),
        pytest.param(
            "Type fp16 is not supported on your device.",
            "DeepSpeed rejects the trial's configuration: Type fp16 is not supported",
            id="anything else",
        ),
    ],
)
def test_what_a_rejected_config_needs(raised: str, told: str) -> None:
    """What was seen, what was expected and what to do. DeepSpeed's own words for all else."""
    assert told in rejection(AssertionError(raised))
