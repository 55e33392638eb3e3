"""Where the driver listens for other machines, and the text form of its address."""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from dataclasses import dataclass

from trial_core.errors import LaunchError
from trial_core.processes.slots.rank_network import own_addresses


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

        Raises:
            LaunchError: no port is free.
        """
        listening = self._bind()
        return listening, driver_address(self.hosts, listening.getsockname()[1])

    def _bind(self) -> socket.socket:
        first, last = self.ports
        problem: OSError | None = None
        for port in range(first, last + 1):
            try:
                if self.bind is not None:
                    family = socket.AF_INET6 if ":" in self.bind else socket.AF_INET
                    return socket.create_server((self.bind, port), family=family)
                if socket.has_dualstack_ipv6():
                    return socket.create_server(
                        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
                    )
                return socket.create_server(("", port))
            except OSError as error:
                problem = error
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
