"""What a user is told whose DeepSpeed config does not fit the ranks."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError, create_model

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
    assert told in str(rejection(AssertionError(raised)))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            "the DeepSpeed config has an unknown key "
            "zero_optimization.offload_optimizer.devic = 'cpu'; did you mean \"device\"?",
        ),
        (
            {"tensorboard": {"job_nam": "x"}},
            "the DeepSpeed config has an unknown key tensorboard.job_nam = 'x'; did you mean "
            '"job_name"?',
        ),
        (
            {"bf16": {"enabled": False}, "fp16": {"enabled": "perhaps"}},
            "DeepSpeed rejects fp16.enabled = 'perhaps' in its config: Input should be a valid "
            "boolean, unable to interpret input",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"ratio": 0.5}}},
            "DeepSpeed rejects zero_optimization in its config: Partial offloading only supported "
            "for ZeRO Stage 3.",
        ),
    ],
)
def test_a_mistake_in_a_section_is_named(section: dict[str, Any], told: str) -> None:
    """DeepSpeed's own error has neither the section nor, in its first line, the key."""
    with pytest.raises(ValidationError) as raised:
        DeepSpeedConfig({"train_batch_size": 1, **section})
    assert rejection(raised.value) == told


def test_errors_of_the_trial_are_not_told_as_the_configs() -> None:
    """Its own pydantic models, and errors that DeepSpeed raises without a config."""
    with pytest.raises(ValidationError) as raised:
        create_model("Own", number=(int, ...))(number="three")
    assert rejection(raised.value) is None
    assert rejection(RuntimeError("no memory")) is None
