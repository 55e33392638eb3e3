"""Where the driver listens for other machines, and the network of the ranks' collectives.

On one machine that is the loopback interface.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from trial_core.errors import LaunchError

LOOPBACK_ADDRESS = "127.0.0.1"
STORE_SOCKET_VARIABLE = "TRIALFLOW_STORE_SOCKET"
"""The number of the descriptor on which rank 0 hosts torch.distributed's store."""


@dataclass(frozen=True)
class ListenAddress:
    """Where the driver listens for agents, or for ranks of other machines.

    Attributes:
        bind: the address of an interface; None for all.
        ports: the first and the last port to try; 0 for any free port.
        advertise: the host name or address that others connect to; None: the bound one.
    """

    bind: str | None = None
    ports: tuple[int, int] = (0, 0)
    advertise: str | None = None

    @property
    def hosts(self) -> list[str]:
        """Where others reach the driver: the advertised name, else the bound addresses."""
        if self.advertise is not None:
            return [self.advertise]
        if self.bind is None or ipaddress.ip_address(self.bind).is_unspecified:
            return own_addresses()
        return [self.bind]

    def open(self) -> tuple[socket.socket, str]:
        """A socket that listens on the first free port, and its address as text.

        Raises LaunchError if no port is free.
        """
        has_both = self.bind is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both or ":" in (self.bind or "") else socket.AF_INET
        first, last = self.ports
        problem: OSError | None = None
        for port in range(first, last + 1):
            try:
                listening = socket.create_server(
                    (self.bind or "", port), family=family, dualstack_ipv6=has_both
                )
            except OSError as error:
                problem = error
            else:
                return listening, driver_address(self.hosts, listening.getsockname()[1])
        where = self.bind or "any address"
        ports = f"port {first}" if first == last else f"ports {first} to {last}"
        raise LaunchError(
            f"the driver cannot listen on {where}, {ports}: {problem}; see resources.channel"
        )


def driver_address(hosts: list[str], port: int) -> str:
    """``tls://10.0.0.5:7600,[fd00::5]:7600``: the addresses that others try, in order."""
    return "tls://" + ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts
    )


def parse_driver_address(text: str) -> list[tuple[str, int]]:
    """The hosts and ports of ``tls://HOST:PORT,…``. Raises LaunchError for any other text."""
    scheme, _, rest = text.partition("://")
    found = []
    for part in rest.split(","):
        try:
            parts = urllib.parse.urlsplit(f"//{part}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if scheme != "tls" or not host or port is None:
            raise LaunchError(
                f"the driver's address is {text!r}, expected tls://HOST:PORT as the driver shows it"
            )
        found.append((host, port))
    return found


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
