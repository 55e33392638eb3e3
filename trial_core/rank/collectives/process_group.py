"""Initialises torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

TIMEOUT = timedelta(days=7)
"""How long a collective may wait for other ranks."""

TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"
"""DeepSpeed's own timeout, in minutes. Where the user has set it, it stays."""


def init_distributed(with_deepspeed: bool) -> None:
    """Initialise torch.distributed in ranks that a driver watches. Collective.

    By default a collective that waits for 10 minutes ends its process, without saying where it
    hangs. But ranks may rightly wait for a rank that compiles, or fetches a checkpoint. The driver
    finds hung ranks and has them log their stacks (`stopping.stall_timeout_seconds`), so the
    timeout of all process groups, DeepSpeed's later ones included, must not come before that.

    Args:
        with_deepspeed: initialise DeepSpeed's communication, too. On the CPU, the first time, it
            compiles an operator.
    """
    if with_deepspeed and TIMEOUT_VARIABLE in os.environ:
        deepspeed.init_distributed()
        return
    # The default timeout of `new_group`; DeepSpeed gives none.
    defaults: Any = distributed_c10d
    defaults.default_pg_timeout = TIMEOUT
    if defaults.default_pg_nccl_timeout is not None:
        defaults.default_pg_nccl_timeout = TIMEOUT
    if with_deepspeed:
        deepspeed.init_distributed(timeout=TIMEOUT)
    elif not dist.is_initialized():
        init_torch_distributed(TIMEOUT)


def init_torch_distributed(timeout: timedelta | None = None) -> None:
    """Initialise torch.distributed for this rank's accelerator, and for the CPU. Collective.

    Args:
        timeout: how long a collective may wait; None for torch's default.
    """
    device = get_accelerator().device_name()
    backend = "gloo"
    if device != "cpu":
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timeout)
