"""Initialises torch.distributed, and hosts its store within this machine.

torch's own socket for the store accepts connections from other machines, without authentication.
So the store gets a socket that is bound to the loopback interface:

- For the ranks of a driver, the driver binds it, and rank 0 inherits it. Its port is reserved from
  the beginning: ranks that come early wait in the socket's queue.
- A process without a launcher binds it itself.

`torch.distributed.init_process_group` then finds the store in this process by its port, also when
the trial calls it. Other launchers decide themselves where their store listens.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

# torch's hints do not list it, its documentation does.
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from trial_core.processes.slots.addresses import (
    LOOPBACK_ADDRESS,
    STORE_SOCKET_VARIABLE,
    collectives_at,
)
from trial_core.rank.collectives.distributed import SINGLE_RANK_ENVIRONMENT

TIMEOUT = timedelta(days=7)
"""How long a collective may wait for other ranks."""

TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"
"""DeepSpeed's own timeout, in minutes. Where the user has set it, it stays."""

_HOSTED: list[TCPStore] = []
"""Keeps the store's server alive until this process ends, or hosts another one."""


def host_store() -> None:
    """Host the store if this rank has inherited the driver's socket; a second call does nothing."""
    descriptor = os.environ.pop(STORE_SOCKET_VARIABLE, None)
    if descriptor is not None:
        listener = socket.socket(fileno=int(descriptor))
        listener.set_inheritable(False)
        _host_at(listener)


def host_single_rank() -> dict[str, str]:
    """Host the store of a process that no launcher has started.

    Returns the environment variables that make this process a single rank and lead to the store.
    Gloo then stays on the loopback interface, too, unless the user has chosen another one.
    """
    listener = socket.create_server((LOOPBACK_ADDRESS, 0))
    port = str(listener.getsockname()[1])
    _host_at(listener)
    chosen = collectives_at(LOOPBACK_ADDRESS)
    gloo = {name: text for name, text in chosen.items() if name not in os.environ}
    return {**SINGLE_RANK_ENVIRONMENT, **gloo, "MASTER_ADDR": LOOPBACK_ADDRESS, "MASTER_PORT": port}


def _host_at(listener: socket.socket) -> None:
    address, port = listener.getsockname()
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        # libuv's server accepts no inherited socket before torch 2.8.
        use_libuv=False,
    )
    # A process group that uses the previous store keeps it.
    _HOSTED[:] = [store]


def init_distributed(with_deepspeed: bool) -> None:
    """Initialise torch.distributed in ranks that a driver watches. Collective.

    By default a collective that waits for 10 minutes ends its process, without saying where it
    hangs. But ranks may rightly wait for a rank that compiles, or fetches a checkpoint. The driver
    finds hung ranks and has them log their stacks (`stopping.stall_timeout_seconds`), so the
    timeout of all process groups, DeepSpeed's later ones included, must not come before that. On
    the CPU, DeepSpeed's communication compiles an operator the first time.
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
    """Initialise torch.distributed for this rank's accelerator, and for the CPU. Collective."""
    device = get_accelerator().device_name()
    backend = "gloo"
    if device != "cpu":
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timeout)
