"""Hosts torch.distributed's store within this machine.

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

# torch's hints do not list it, its documentation does.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trial_core.processes.slots.rank_network import (
    LOOPBACK_ADDRESS,
    STORE_SOCKET_VARIABLE,
    collectives_at,
)
from trial_core.rank.collectives.distributed import SINGLE_RANK_ENVIRONMENT

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

    Returns:
        The environment variables that make this process a single rank and lead to the store. Gloo
        then also stays on the loopback interface, unless the user has chosen another one.
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
