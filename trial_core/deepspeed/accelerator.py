"""The accelerator that a rank computes on, and its random number generator."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator


def claim_accelerator(local_rank: int) -> None:
    """Make the machine's accelerator number `local_rank` this rank's current one.

    Call before anything is put on a device. The current one is number 0 on every rank by default,
    and DeepSpeed sets it only when it builds an engine. Does nothing on a CPU rank.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)


def accelerator_rng_state() -> Any:
    """The state of this rank's accelerator generator; None on a CPU rank."""
    accelerator = get_accelerator()
    return None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()


def restore_accelerator_rng(state: Any) -> None:
    """Restore `accelerator_rng_state`. Does nothing on a CPU rank."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state)
