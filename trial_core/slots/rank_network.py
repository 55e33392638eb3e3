"""The network of the ranks' collectives: the loopback interface, as all share one machine."""

from __future__ import annotations

import socket

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
STORE_SOCKET_VARIABLE = "TRIALFLOW_STORE_SOCKET"
"""The number of the descriptor on which rank 0 hosts torch.distributed's store."""


def loopback_collectives() -> dict[str, str]:
    """The variable that keeps gloo within this machine; empty without Linux's interface ``lo``."""
    if any(name == LOOPBACK_INTERFACE for _, name in socket.if_nameindex()):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    return {}
