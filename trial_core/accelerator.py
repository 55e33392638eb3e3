"""The accelerator that a rank computes on, and its random number generator."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import ADVICE


def claim_accelerator(local_rank: int) -> None:
    """Make the machine's accelerator number `local_rank` this rank's current one.

    Call before anything is put on a device. The current one is number 0 on every rank by default,
    and DeepSpeed sets it only when it builds an engine. Does nothing on a CPU rank.

    Raises:
        LaunchError: torch finds no such accelerator.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    count = accelerator.device_count() if accelerator.is_available() else 0
    wanted = f"this rank should train on {accelerator.device_name()} device {local_rank}"
    if count == 0:
        raise LaunchError(
            f"{wanted}, but torch {torch.__version__} finds none{_reason()}; install a torch build "
            f"for this machine's driver (docs/guides/gpu.md); {ADVICE}"
        )
    if local_rank >= count:
        raise LaunchError(
            f"{wanted}, but only {count} of them can be seen: start at most {count} ranks on this "
            "machine, or show each rank all devices (CUDA_VISIBLE_DEVICES)"
        )
    accelerator.set_device(local_rank)


def _reason() -> str:
    """Why CUDA finds no device, if it says so."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f": {error}"
    return ""


def accelerator_rng_state() -> Any:
    """The state of this rank's accelerator generator; None on a CPU rank."""
    accelerator = get_accelerator()
    return None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()


def restore_accelerator_rng(state: Any) -> None:
    """Restore `accelerator_rng_state`. Does nothing on a CPU rank."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state)
