"""The size of micro-batches that the driver has chosen, without engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from trial_core.deepspeed.context import micro_batches_of
from trial_core.errors import TrialError


def size_of(batch: int) -> tuple[int, int]:
    """Configure an engine whose ranks have batches of so many samples. Return size and number."""
    config: Any = SimpleNamespace(
        train_micro_batch_size_per_gpu=batch, gradient_accumulation_steps=1
    )
    DeepSpeedConfig._configure_train_batch_size(config)
    return config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes the sizes as they are, and outside the block no other ones."""
    monkeypatch.setattr(DeepSpeedConfig, "_configure_train_batch_size", lambda config: None)


@pytest.mark.parametrize(
    ("samples", "batch", "expected"),
    [(None, 24, (24, 1)), (0, 24, (24, 1)), (12, 24, (12, 2)), (12, 32, (8, 4)), (12, 8, (8, 1))],
)
def test_micro_batches_have_at_most_so_many_samples(
    samples: int | None, batch: int, expected: tuple[int, int]
) -> None:
    """The largest size that divides a rank's batch, which changes with the number of ranks."""
    with micro_batches_of(samples):
        assert size_of(batch) == expected
    assert size_of(batch) == (batch, 1)


def test_engines_have_micro_batches_of_one_size() -> None:
    """That of the first: they accumulate together."""
    with micro_batches_of(6):
        assert size_of(8) == (4, 2)
        assert size_of(12) == (4, 3)
        with pytest.raises(TrialError, match="a batch of 6 samples a rank cannot be divided"):
            size_of(6)
