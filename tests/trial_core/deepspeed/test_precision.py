"""Training in 16 bits, on real ranks.

Whether it is to be had is the device's business, which DeepSpeed asks when an engine is built. CPU
ranks train in bf16; in fp16 only where the processor computes in it (AVX512-FP16 or AMX-FP16), and
elsewhere DeepSpeed refuses it (`test_refused_trials`). GPUs do both. `test_engines` has what bf16
learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from tests.support.slots import drive, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
OWN_CONFIG = "engine_trials:OwnConfig"

# The loss scale is doubled every other batch, so that resuming at another one would show.
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}


def own(zero_stage: int, **precision: Any) -> dict[str, Any]:
    """Hyperparameters of a trial in that precision, which accumulates over 3 micro-batches."""
    return {
        "accumulation": 3,
        "ds_config": {"zero_optimization": {"stage": zero_stage}, **precision},
    }


@pytest.fixture
def needs_fp16() -> None:
    """Skip where the ranks' device does not compute in fp16."""
    if not get_accelerator().is_fp16_supported():
        pytest.skip(f"DeepSpeed has no fp16 on this device ({get_accelerator().device_name()})")


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bf16_resumes_bit_identically(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """The fp32 weights, where ZeRO keeps them, and those in bf16 alike."""
    assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, OWN_CONFIG, **own(zero_stage, bf16={"enabled": True})
    )


@pytest.mark.usefixtures("needs_fp16")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_fp16_resumes_bit_identically(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """The loss scale, which moves as training does, goes on where it was."""
    assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, OWN_CONFIG, **own(zero_stage, fp16=FP16)
    )


# Not without ZeRO: DeepSpeed's 16-bit optimizer then begins with a step of Adam's on no gradients.
@pytest.mark.usefixtures("needs_fp16")
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_fp16_learns_what_fp32_does(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """Up to rounding: what is learnt are weights in fp32."""

    def loss(**precision: Any) -> float:
        config = toy_config(
            tmp_path, 8, entrypoint=OWN_CONFIG, hyperparameters=own(zero_stage, **precision)
        )
        return float(drive(warm_slots(2), config, tmp_path).validation[-1]["loss"])

    assert loss(fp16=FP16) == pytest.approx(loss(), rel=0.05)
