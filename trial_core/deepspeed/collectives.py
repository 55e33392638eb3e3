"""Initialises torch.distributed in ranks that a driver watches."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import deepspeed
from torch.distributed import distributed_c10d

TIMEOUT = timedelta(days=7)
"""How long a collective may wait for other ranks."""

TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"
"""DeepSpeed's own timeout, in minutes. Where the user has set it, it stays."""


def init_distributed() -> None:
    """Initialise torch.distributed. Collective: every rank calls this.

    By default a collective that waits for 10 minutes ends its process, without a word of where it
    hangs. But ranks may rightly wait for one that compiles, or fetches a checkpoint. The driver
    finds hung ranks and has them log their stacks (`stopping.stall_timeout_seconds`), so the
    timeout of all process groups, DeepSpeed's later ones included, must not come before that.
    """
    if TIMEOUT_VARIABLE in os.environ:
        deepspeed.init_distributed()
        return
    # What `new_group` takes without a timeout, and DeepSpeed gives none.
    defaults: Any = distributed_c10d
    defaults.default_pg_timeout = TIMEOUT
    if defaults.default_pg_nccl_timeout is not None:
        defaults.default_pg_nccl_timeout = TIMEOUT
    deepspeed.init_distributed(timeout=TIMEOUT)
