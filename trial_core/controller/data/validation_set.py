"""The validation set as one rank sees it: its shard, and how ranks agree on what counts."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trial_core.controller.data.data_rng import drawn_alike
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.data.dataloader import DataLoader

logger = logging.getLogger(__name__)


class Lookahead(Iterator[Any]):
    """Micro-batches, and the answer to whether there are more. Loads none before it must."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._loaded: deque[Any] = deque()
        self._ended = False

    def __next__(self) -> Any:
        return self._loaded.popleft() if self._loaded else next(self._source)

    def has(self, count: int) -> bool:
        """Whether there are `count` more micro-batches."""
        if self._ended:
            return False
        self._loaded.extend(itertools.islice(self._source, count - len(self._loaded)))
        return len(self._loaded) >= count

    def go_on_with(self, micro_batch: Any) -> None:
        """There are no more; but to keep step, give `micro_batch` without end from here on."""
        self._ended = True
        self._loaded.clear()
        self._source = itertools.repeat(micro_batch)


@dataclass
class ValidationSet:
    """This rank's part of the validation set.

    Attributes:
        loader: what the trial built, unsharded; None on a rank that needs no data.
        shard: this rank's part of it, to iterate over once a validation; None likewise.
        seed: the experiment's.
        group: micro-batches that one `evaluate_batch` takes.
        in_lockstep: whether all ranks must evaluate equally often.
        pads: whether all ranks then go on with the longest shard, or end with the shortest.
        own_evaluations: what the shard is good for; None when that is not known beforehand.
        all_evaluations: what all ranks do, in lockstep; None when not known beforehand, and then
            ranks ask one another before each.
        limit: evaluations after which every rank ends all the same; None: none.
    """

    loader: Any
    shard: Any
    seed: int
    group: int
    data_parallel_rank: int
    in_lockstep: bool
    pads: bool
    own_evaluations: int | None
    all_evaluations: int | None
    limit: int | None = None

    def begin(self) -> Lookahead | None:
        """A pass over this rank's shard; None without data."""
        return None if self.shard is None else Lookahead(iter(self.shard))

    def evaluations(
        self, batches: Lookahead | None, distributed: DistributedContext
    ) -> Iterator[bool]:
        """One item for each `evaluate_batch` that this rank must call: whether it counts.

        Collective, in lockstep: every rank goes through it.

        Raises:
            TrialError: not a single whole group of micro-batches, where groups cannot be padded.
        """
        for index in itertools.count() if self.limit is None else range(self.limit):
            own = self._has_own(batches, index)
            if not self.in_lockstep:
                goes_on = bool(own)
            elif self.all_evaluations is not None:
                goes_on = index < self.all_evaluations
            else:
                everyone = distributed.allgather((self.data_parallel_rank, own))
                goes_on = self._agree([answer for _, answer in everyone], index)
                if own is None:  # a rank without data goes by those that share its shard
                    own = any(
                        answer for rank, answer in everyone if rank == self.data_parallel_rank
                    )
            if not goes_on:
                return
            yield own is not False

    def whole(self) -> Any:
        """The whole validation set, unsharded."""
        if not isinstance(self.loader, DataLoader):
            return self.loader
        return self.loader.get_data_loader(seed=self.seed)

    def padding(self) -> Any:
        """A micro-batch to keep step with. Not of the shard, which may be empty."""
        for micro_batch in self.whole():
            return micro_batch
        raise TrialError(
            "a rank has no validation batch left to keep in step with: the loader that "
            "build_validation_data_loader returned there yields nothing more. Return a loader "
            "that can be read again, with at least one batch on every rank that needs data"
        )

    def _has_own(self, batches: Lookahead | None, index: int) -> bool | None:
        """Whether this evaluation is of this rank's own shard; None where others must say."""
        if self.own_evaluations is not None and index >= self.own_evaluations:
            return False
        if batches is None:
            return None if self.own_evaluations is None else True
        # Where the number is agreed on, a loader that ends early is a mistake to be shown.
        return self.all_evaluations is not None or batches.has(self.group)

    def _agree(self, everyone: list[bool | None], index: int) -> bool:
        have = [one for one in everyone if one is not None]
        goes_on = bool(have) and (any(have) if self.pads else all(have))
        if not goes_on and index == 0 and not self.pads:
            raise too_small(self.group, "fewer than that on some rank")
        return goes_on


def validation_set(
    engine: TrialEngine, loader: Any, seed: int, distributed: DistributedContext
) -> ValidationSet:
    """Shard the validation loader and agree on what counts. Collective: every rank calls this.

    Raises:
        TrialError: on all ranks alike, if some rank's shard holds not a single whole group of
            micro-batches, where groups cannot be padded.
    """
    shard, group = sharded(engine, loader, seed), engine.micro_batches_per_evaluation
    own = length(shard)
    if shard is not None:
        shard = drawn_alike(shard, engine, distributed, seed)
    lengths = distributed.allgather((shard is not None, own, engine.data_parallel_rank))
    known = [size for has_data, size, _ in lengths if has_data and size is not None]
    unknown = any(has_data and size is None for has_data, size, _ in lengths)
    if shard is None:  # what counts on a rank without data is what those of its shard evaluate
        peers = [size for has_data, size, rank in lengths
                 if has_data and rank == engine.data_parallel_rank]  # fmt: skip
        own = next((size for size in peers if size is not None), None)
    together = None
    if engine.evaluates_in_lockstep and known and not unknown:
        counts = [size // group for size in known]
        together = max(counts) if engine.pads_evaluation else min(counts)
        if not engine.pads_evaluation:
            _warn_of_rest(known, together, group, distributed)
    return ValidationSet(
        loader=loader,
        shard=shard,
        seed=seed,
        group=group,
        data_parallel_rank=engine.data_parallel_rank,
        in_lockstep=engine.evaluates_in_lockstep,
        pads=engine.pads_evaluation,
        own_evaluations=None if own is None else own // group,
        all_evaluations=together,
    )


def sharded(engine: TrialEngine, loader: Any, seed: int) -> Any:
    """This rank's part of one pass; a loader of the trial's own is taken to be that already."""
    if not isinstance(loader, DataLoader):
        return loader
    return loader.get_data_loader(
        num_replicas=engine.data_parallel_size, rank=engine.data_parallel_rank, seed=seed
    )


def length(loader: Any) -> int | None:
    """The number of micro-batches of a loader; None when there is no telling, or no loader."""
    try:
        return len(loader)
    except TypeError:
        return None


def too_small(group: int, seen: str) -> TrialError:
    """The refusal of a validation set without a whole group of micro-batches."""
    return TrialError(
        "the validation set is too small for pipeline parallelism, where one evaluate_batch takes "
        f"gradient_accumulation_steps = {group} micro-batches from every data-parallel rank: the "
        f"validation loader has {seen}. Give build_validation_data_loader a smaller batch size or "
        "more samples, or lower gradient_accumulation_steps"
    )


def _warn_of_rest(
    sizes: list[int], together: int, group: int, distributed: DistributedContext
) -> None:
    if together == 0:
        raise too_small(group, f"{min(sizes)} on some rank")
    left_out = max(sizes) - together * group
    if left_out and distributed.get_rank() == 0:
        logger.warning(
            "with pipeline parallelism, validation takes whole groups of "
            "gradient_accumulation_steps = %d micro-batches: up to %d of %d micro-batches of a "
            "data-parallel rank are left out",
            group,
            left_out,
            max(sizes),
        )
