"""Builds engines with other micro-batches than configured; `train_batch_size` stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.config import DeepSpeedConfig

from trial_core.errors import TrialError


@contextmanager
def micro_batches_of(samples: int | None) -> Iterator[None]:
    """Inside the block, engines are built with micro-batches of `samples` samples.

    DeepSpeed has no call for it: once an engine is built, its optimizer counts the steps of
    accumulation itself.

    Args:
        samples: 0 means a whole batch of the rank; None means as configured.

    Raises:
        TrialError: in the block, if a batch of a rank cannot be divided so.
    """
    if samples is None:
        yield
        return
    configure = DeepSpeedConfig._configure_train_batch_size

    def configure_otherwise(config: DeepSpeedConfig) -> None:
        configure(config)
        batch = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        wanted = samples or batch
        if batch % wanted:
            raise TrialError(
                f"a batch of {batch} samples a rank cannot be divided into micro-batches of "
                f"{wanted}; give engines batches of the same size"
            )
        config.train_micro_batch_size_per_gpu = wanted
        config.gradient_accumulation_steps = batch // wanted

    DeepSpeedConfig._configure_train_batch_size = configure_otherwise
    try:
        yield
    finally:
        DeepSpeedConfig._configure_train_batch_size = configure
