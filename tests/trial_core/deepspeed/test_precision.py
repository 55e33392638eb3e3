"""Training in 16 bits, on real ranks.

CPU ranks support bf16, and fp16 only on processors with AVX512-FP16 or AMX-FP16; elsewhere
DeepSpeed refuses fp16 (`test_refused_trials`). `test_several_engines` compares bf16 with fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from tests.support.slots import drive, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.errors import RankFailed
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
OWN_CONFIG = "engine_trials:OwnConfig"

# The loss scale doubles every other batch, so that a wrong one after resuming is seen.
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}


def own(zero_stage: int, **precision: Any) -> dict[str, Any]:
    """Hyperparameters for a precision, with accumulation over 3 micro-batches."""
    return {
        "accumulation": 3,
        "ds_config": {"zero_optimization": {"stage": zero_stage}, **precision},
    }


@pytest.fixture
def needs_fp16() -> None:
    """Skip if the ranks' device does not support fp16."""
    if not get_accelerator().is_fp16_supported():
        pytest.skip(f"DeepSpeed has no fp16 on this device ({get_accelerator().device_name()})")


# By default `test_compiled_models` and `test_optimizer_modes` resume in bf16.
@pytest.mark.long
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bf16_resumes_bit_identically(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """Both the fp32 weights, if ZeRO keeps them, and those in bf16."""
    assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, OWN_CONFIG, **own(zero_stage, bf16={"enabled": True})
    )


@pytest.mark.long
@pytest.mark.usefixtures("needs_fp16")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_fp16_resumes_bit_identically(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """The dynamic loss scale is restored too."""
    assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, OWN_CONFIG, **own(zero_stage, fp16=FP16)
    )


# Not without ZeRO: DeepSpeed's 16-bit optimizer then begins with a step without gradients.
@pytest.mark.long
@pytest.mark.usefixtures("needs_fp16")
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_fp16_learns_what_fp32_does(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """Up to rounding: the optimizer steps on weights in fp32."""

    def loss(**precision: Any) -> float:
        config = toy_config(
            tmp_path, 8, entrypoint=OWN_CONFIG, hyperparameters=own(zero_stage, **precision)
        )
        return float(drive(warm_slots(2), config, tmp_path).validation[-1]["loss"])

    assert loss(fp16=FP16) == pytest.approx(loss(), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(("then", "now"), [("FusedAdam", "AdamW"), ("AdamW", "FusedAdam")])
def test_a_fused_optimizer_is_another_class_without_zero(
    warm_slots: Warm, tmp_path: Path, then: str, now: str
) -> None:
    """DeepSpeed keeps the weights in fp32 of a fused class as one tensor, which it alone reads."""

    def config(kind: str, batches: int) -> Any:
        params = {"lr": 0.01, "torch_adam": kind == "AdamW"}
        optimizer = {"optimizer": {"type": "AdamW", "params": params}}
        hyperparameters = own(0, bf16={"enabled": True}, **optimizer)
        return toy_config(tmp_path, batches, entrypoint=OWN_CONFIG, hyperparameters=hyperparameters)

    first = drive(warm_slots(2), config(then, 4), tmp_path, persist=True)
    with pytest.raises(RankFailed, match=f"was of {then} .* has built one of {now}: "):
        drive(warm_slots(2), config(now, 8), tmp_path, resume=first)
