"""The network of the ranks' collectives: on one machine, the loopback interface."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import psutil

LOOPBACK_ADDRESS = "127.0.0.1"
STORE_SOCKET_VARIABLE = "TRIALFLOW_STORE_SOCKET"
"""The number of the descriptor on which rank 0 hosts torch.distributed's store."""


def collectives_at(address: str) -> dict[str, str]:
    """The variables that keep gloo, and NCCL between machines, on the network of an own address.

    Empty if no interface has the address, like the loopback one on a system without ``lo``.
    """
    of_interfaces = psutil.net_if_addrs().items()
    having = (
        name
        for name, entries in of_interfaces
        if any(entry.address.partition("%")[0] == address for entry in entries)
    )
    if (name := next(having, None)) is None:
        return {}
    if ipaddress.ip_address(address).is_loopback:  # within a machine, NCCL needs no network
        return {"GLOO_SOCKET_IFNAME": name}
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def addresses_in(network: str) -> list[str]:
    """This machine's addresses in a network, such as ``10.0.0.0/16``, or of an interface."""
    interfaces = psutil.net_if_addrs()
    if network in interfaces:
        return _addresses(interfaces[network])
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        return []
    every = [each for entries in interfaces.values() for each in _addresses(entries)]
    return [address for address in every if ipaddress.ip_address(address) in wanted]


def own_addresses() -> list[str]:
    """This machine's addresses for other machines; the loopback address if it has none."""
    found = [
        address
        for entries in psutil.net_if_addrs().values()
        for address in _addresses(entries)
        if not ipaddress.ip_address(address).is_loopback
    ]
    return sorted(found, key=lambda address: ":" in address) or [LOOPBACK_ADDRESS]


def _addresses(entries: Sequence[Any]) -> list[str]:
    """An interface's IPv4 and IPv6 addresses, without those that are valid on a link alone."""
    found = [
        entry.address
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    return [each for each in found if not ipaddress.ip_address(each).is_link_local]
