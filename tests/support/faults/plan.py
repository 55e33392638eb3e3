"""Plans: which fault meets which request. Plain data, so that a test can enumerate them.

A plan counts requests and answers each with a fault or none. A request is one to the S3 endpoint
(``PUT``, ``/bucket/key?uploadId=…``) or an operation of the file system (``put_file``,
``/root/key``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "cut request",
    "cut reply",
    "lose reply",
    "500",
    "503",
    "page",
    "hang",
    "slow",
    "kill before",
    "kill after",
    "late",
]


@dataclass(frozen=True)
class Fault:
    """A fault, and the requests that meet it.

    Attributes:
        kind: ``cut request``: the connection ends after `byte` bytes of the request's body, and
            the request is not carried out; ``cut reply``: it ends after `byte` bytes of the
            reply's body; ``lose reply``: the request is carried out, the connection ends without
            a reply; ``500``, ``503``: that reply (the second with SlowDown), not carried out;
            ``page``: the page of a proxy that has lost its server (`FaultyS3.page`), not carried
            out; ``hang``: no reply until the client disconnects; ``slow``: `bytes_per_second` both
            ways; ``kill before``, ``kill after``: the endpoint calls `on_kill` before or after
            the request is carried out, and sends no reply; ``late``: the connection ends, and the
            request is carried out afterwards.
        first: index, from 0, of the first matching request that meets the fault.
        times: number of requests that meet it from there on; None: all.
        is_alike: whether the requests after the first must be retries of the first.
        method: the method that matches; None: any.
        key: text that the path with its query must contain.
        byte: where to cut.
        bytes_per_second: speed of ``slow``.
    """

    kind: Kind
    first: int = 0
    times: int | None = 1
    is_alike: bool = False
    method: str | None = None
    key: str = ""
    byte: int = 0
    bytes_per_second: int = 10**6


@dataclass(frozen=True)
class Seen:
    """A request, its client, and the fault that it met."""

    index: int
    client: str
    method: str
    key: str
    fault: Fault | None

    def __str__(self) -> str:
        met = f"  ← {self.fault.kind}" if self.fault else ""
        return f"{self.index:3} {self.client}: {self.method} {self.key}{met}"


class Plan:
    """Some faults, and all requests so far. Safe to use from several threads."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._matched = [0] * len(faults)
        self._met: list[list[tuple[str, str]]] = [[] for _ in faults]
        self.seen: list[Seen] = []

    def next(self, client: str, method: str, key: str) -> Seen:
        """Count a request. It meets the first fault that applies."""
        with self._lock:
            met: Fault | None = None
            for number, fault in enumerate(self._faults):
                if self._applies(number, fault, method, key) and met is None:
                    self._met[number].append((method, key))
                    met = fault
            seen = Seen(len(self.seen), client, method, key, met)
            self.seen.append(seen)
            return seen

    @property
    def has_struck(self) -> bool:
        """Whether any request has met a fault."""
        return bool(self.struck())

    def struck(self) -> list[Seen]:
        """The requests that have met a fault."""
        return [seen for seen in self.seen if seen.fault]

    def __str__(self) -> str:
        return "\n".join(map(str, self.seen))

    def _applies(self, number: int, fault: Fault, method: str, key: str) -> bool:
        if fault.method not in (None, method) or fault.key not in key:
            return False
        index, met = self._matched[number], self._met[number]
        self._matched[number] += 1
        if index < fault.first or len(met) == fault.times:
            return False
        return not fault.is_alike or not met or (method, key) == met[0]
