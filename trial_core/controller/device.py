"""Which accelerator a rank computes on."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator


def claim_accelerator(local_rank: int) -> None:
    """Make the machine's accelerator number `local_rank` this rank's current one.

    Before anything is put on a device: the current one is number 0 on every rank until somebody
    says otherwise, and DeepSpeed does so only when it builds an engine. Without accelerators there
    is nothing to claim.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
