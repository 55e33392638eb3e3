"""The same random numbers for the same micro-batch, on every rank that loads it.

The first stage of a pipeline needs a micro-batch's inputs, and the last stage its labels. If
loading draws random numbers (noise, masked words), both must draw the same ones, although the
models of the two ranks draw different ones. So loading gets separate generators. They are seeded
for each micro-batch, by its position in the sequence that all ranks share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.seeding import derive_seed, isolated, seed_globals
from trial_core.rank.trial.trial_adapter import TrialAdapter


def with_shared_rng(
    micro_batches: Iterable[Any],
    adapter: TrialAdapter,
    distributed: DistributedContext,
    seed: int,
    skipped: int = 0,
) -> Iterable[Any]:
    """`micro_batches`, loaded with the same random numbers on all ranks that share a data shard.

    Returns `micro_batches` itself if every rank has its own shard. `skipped` micro-batches of this
    rank came before these.
    """
    if adapter.data_parallel_size == distributed.get_size():
        return micro_batches
    return _SharedRngLoader(
        micro_batches,
        seed,
        first=skipped * adapter.data_parallel_size + adapter.data_parallel_rank,
        stride=adapter.data_parallel_size,
    )


@dataclass
class _SharedRngLoader:
    source: Iterable[Any]
    seed: int
    first: int
    stride: int

    def __iter__(self) -> Iterator[Any]:
        return isolated(self._seeded())

    def _seeded(self) -> Iterator[Any]:
        source = iter(self.source)
        for position in itertools.count(self.first, self.stride):
            seed_globals(derive_seed(self.seed, "micro-batch", 0, position))
            try:
                micro_batch = next(source)
            except StopIteration:
                return
            yield micro_batch
