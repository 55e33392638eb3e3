"""Hosts torch.distributed's store for the ranks of a driver, within this machine.

torch's own socket for the store accepts connections from other machines, without authentication.
So the driver binds a socket to the loopback interface, and rank 0 inherits it. Its port is reserved
from the beginning: ranks that come early wait in the socket's queue.
"""

from __future__ import annotations

import os
import socket

# torch's hints do not list it, its documentation does.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trial_core.slots.launcher import STORE_SOCKET_VARIABLE

_HOSTED: list[TCPStore] = []
"""Keeps the store's server alive until this process ends."""


def host_store() -> None:
    """Host the store if this rank has inherited the driver's socket; a second call does nothing.

    `torch.distributed.init_process_group` then finds the store in this process by its port, also
    when the trial calls it.
    """
    descriptor = os.environ.pop(STORE_SOCKET_VARIABLE, None)
    if descriptor is None:
        return
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
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
    _HOSTED.append(store)
