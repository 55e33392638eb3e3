"""What trials and scripts say that a sample or a step holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trial_core.errors import TrialTypeError, TrialValueError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.context import TrainContext
from trial_core.rank.trial.context import RunInfo, TrialContext


def trial_context() -> TrialContext:
    return TrialContext(RunInfo("toy-1", {}), DistributedContext.from_environment())


def test_numpys_numbers_are_numbers() -> None:
    """A length is often computed with NumPy."""
    context = trial_context()
    context.set_work_per_sample(tokens=np.int64(128), flops=np.float32(1e9), number_type="fp16")
    work = context.run_info.sample_work
    assert (work.samples, work.tokens, work.flops, work.number_type) == (1, 128, 1e9, "fp16")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tokens", "flops"])
def test_a_number_is_positive_and_finite(name: str, value: float) -> None:
    """The error names the argument and its value."""
    with pytest.raises(TrialValueError, match=f"{name} is a positive, finite number, got {value}"):
        trial_context().set_work_per_sample(**{name: value})


@pytest.mark.parametrize("value", ["many", True, [3]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    """Not converted: a mistake would be a wrong speed."""
    with pytest.raises(TrialTypeError, match="tokens is a number, got"):
        trial_context().set_work_per_sample(tokens=value)


def test_an_unknown_number_type_is_refused() -> None:
    """The error lists those that exist."""
    with pytest.raises(TrialValueError, match="one of bf16, fp16, tf32, fp32, got 'fp8'"):
        trial_context().set_work_per_sample(flops=1, number_type="fp8")  # type: ignore[arg-type]


def test_a_script_is_checked_likewise() -> None:
    """By the name that it has called."""
    train = TrainContext(SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(TrialValueError, match=r"train\.set_work_per_step: samples is a positive"):
        train.set_work_per_step(samples=0)
