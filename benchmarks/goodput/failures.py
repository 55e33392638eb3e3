"""Plans the failures and their batches: the same list for every contestant, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STORAGE, RANKS = "storage", "ranks"
KINDS = {
    "rank": "SIGKILL of one rank",
    "all": "SIGKILL of all ranks at once",
    "driver": "SIGKILL of the launcher or driver",
    "hang": "a rank hangs in its batch",
    STORAGE: "the storage answers 503 to each request for a while",
    "preempt": "SIGTERM to the launcher or driver, as a preemption",
    RANKS: "the run is stopped and started again on one rank",
}


@dataclass(frozen=True)
class Failure:
    """A failure, and the batch after which it happens.

    Attributes:
        kind: of `KINDS`.
        rank: the one that is killed or hangs.
        after_seconds: the least time since the failure before it, or since the first batch.
    """

    kind: str
    batch: int
    rank: int = 0
    after_seconds: float = 0.0


def planned(kinds: Sequence[str], batches: int, seed: int, outage_batches: int) -> list[Failure]:
    """Return a failure of each kind, in an order and at batches that the seed gives.

    The run is divided into equal sections; the storage's has `outage_batches` more. A failure is in
    the first half of its section, so that most runs train again before the next one. The change to
    one rank comes last: a rank alone would meet other failures than two.

    Raises:
        ValueError: the run is too short for them.
    """
    length = (batches - (outage_batches if STORAGE in kinds else 0)) // max(len(kinds), 1)
    if length < 10:
        raise ValueError(
            f"{batches} batches are too few for {len(kinds)} failures and an outage of "
            f"{outage_batches} batches: give more, or fewer or shorter failures"
        )
    draw = random.Random(seed)
    order = sorted(kinds)
    draw.shuffle(order)
    order.sort(key=lambda kind: kind == RANKS)
    found, begins = [], 0
    for kind in order:
        batch = begins + length // 10 + draw.randrange(max(1, length // 2))
        found.append(Failure(kind, batch, draw.randrange(2)))
        begins += length + (outage_batches if kind == STORAGE else 0)
    return found


def repeated(every_seconds: float, seconds: float, ranks: int, seed: int) -> list[Failure]:
    """Return the deaths of one rank, drawn anew each time, of a run of so many seconds."""
    draw = random.Random(seed)
    return [
        Failure("rank", 0, draw.randrange(ranks), every_seconds)
        for _ in range(int(seconds / every_seconds))
    ]
