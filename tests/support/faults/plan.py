"""Plans: what goes wrong, with which request or operation. Data, so that a test can list them all.

A plan counts what it is asked about and answers with a fault or with none. The S3 endpoint asks
about requests (``PUT``, ``/bucket/key?uploadId=…``), the file system about operations
(``put_file``, ``/root/key``).
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
    "hang",
    "slow",
    "kill before",
    "kill after",
]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: ``cut request``: the connection ends after `byte` bytes of the request's body, and
            the server never sees it; ``cut reply``: after `byte` bytes of the reply's body;
            ``lose reply``: the request is carried out, and the connection ends without an answer;
            ``500``, ``503``: that answer (the second with SlowDown), the request is not carried
            out; ``hang``: no answer until the client goes away; ``slow``: `bytes_per_second` both
            ways; ``kill before``, ``kill after``: whoever listens for faults is told, before the
            request is carried out or after, and the client gets no answer.
        first: the index, from 0, of the first one to meet it, among those that match.
        times: how many meet it from there on; None: all.
        is_alike: whether those after the first must be the same request again: a retry of it.
        method: which methods match; None: any.
        key: what the path with its query must contain.
        byte: where to cut.
        bytes_per_second: of ``slow``.
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
    """A request or operation that a plan was asked about.

    Attributes:
        client: which client sent it.
        fault: what it met.
    """

    index: int
    client: str
    method: str
    key: str
    fault: Fault | None

    def __str__(self) -> str:
        met = f"  ← {self.fault.kind}" if self.fault else ""
        return f"{self.index:3} {self.client}: {self.method} {self.key}{met}"


class Plan:
    """Some faults, and all that has been seen so far. Safe to use from several threads."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._matched = [0] * len(faults)
        self._met: list[list[tuple[str, str]]] = [[] for _ in faults]
        self.seen: list[Seen] = []

    def next(self, client: str, method: str, key: str) -> Seen:
        """Count one more; says which fault it meets, if any: the first of those that apply."""
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
        """Whether anything has met a fault."""
        return bool(self.struck())

    def struck(self) -> list[Seen]:
        """What has met a fault."""
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
