"""The validation set on one rank: its shard, and how ranks agree on which batches count."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trial_core.errors import TrialError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.dataloader import DataLoader
from trial_core.rank.data.micro_batch_seeds import with_shared_rng
from trial_core.rank.data.seekable_samplers import length_of
from trial_core.rank.trial.trial_adapter import TrialAdapter

logger = logging.getLogger(__name__)

# A validation without a known length says so when it has evaluated so many batches.
REMARKABLE_EVALUATIONS = frozenset(10**power for power in range(4, 16))


class PeekableIterator(Iterator[Any]):
    """Micro-batches that can be checked for more. Loads each one as late as possible."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._loaded: deque[Any] = deque()
        self._has_ended = False

    def __next__(self) -> Any:
        return self._loaded.popleft() if self._loaded else next(self._source)

    def has(self, count: int) -> bool:
        if self._has_ended:
            return False
        while len(self._loaded) < count:
            # Not by a for loop: iter() begins a new pass of some loaders that are iterators.
            try:
                self._loaded.append(next(self._source))
            except StopIteration:
                return False
        return True

    def repeat_forever(self, micro_batch: Any) -> None:
        """Drop the remaining data, and yield `micro_batch` again and again as padding."""
        self._has_ended = True
        self._loaded.clear()
        self._source = itertools.repeat(micro_batch)


@dataclass
class ValidationSet:
    """This rank's part of the validation set.

    Attributes:
        loader, shard: the trial's loader, and this rank's shard of it, iterated once per
            validation; None on a rank that needs no data.
        group_size, in_lockstep, pads: see `TrialAdapter`.
        own_evaluations: `evaluate_batch` calls that the shard has data for; None if unknown.
        agreed_evaluations: calls of all ranks in lockstep; None if unknown. Ranks then exchange
            before each call whether they have data.
        warning: what is left out of each validation, for people; empty without that.
        limit: maximum number of calls.
    """

    loader: Any
    shard: Any
    seed: int
    group_size: int
    data_parallel_rank: int
    in_lockstep: bool
    pads: bool
    own_evaluations: int | None
    agreed_evaluations: int | None
    warning: str = ""
    limit: int | None = None

    def begin(self) -> PeekableIterator | None:
        """Begin a pass over this rank's shard; None on a rank that needs no data."""
        return None if self.shard is None else PeekableIterator(iter(self.shard))

    def evaluations(
        self, batches: PeekableIterator | None, distributed: DistributedContext
    ) -> Iterator[bool]:
        """One item for each `evaluate_batch` call of this rank: whether the call counts.

        Collective in lockstep: every rank iterates over it. Raises TrialError if the set holds no
        whole group of micro-batches, and groups cannot be padded.
        """
        for index in itertools.count() if self.limit is None else range(self.limit):
            if index in REMARKABLE_EVALUATIONS and self.own_evaluations is None:
                logger.warning(
                    f"this validation has evaluated {index} batches of a loader without a length, "
                    "and continues; if the loader never ends, stop the run, and end the loader's "
                    "iteration or give it a __len__"
                )
            own = self._has_own(batches, index)
            if not self.in_lockstep:
                continues = bool(own)
            elif self.agreed_evaluations is not None:
                continues = index < self.agreed_evaluations
            else:
                answers = distributed.allgather((self.data_parallel_rank, own))
                continues = self._all_continue([answer for _, answer in answers], index)
                if own is None:  # a rank without data follows the ranks of the same shard
                    own = any(answer for rank, answer in answers if rank == self.data_parallel_rank)
            if not continues:
                return
            yield own is not False

    def unsharded(self) -> Any:
        if not isinstance(self.loader, DataLoader):
            return self.loader
        return self.loader.get_data_loader(seed=self.seed)

    def padding_micro_batch(self) -> Any:
        """A micro-batch for padding, from the whole set: this rank's shard may be empty."""
        for micro_batch in self.unsharded():
            return micro_batch
        raise TrialError(
            "a rank has no validation batch left to keep in step with: the loader that "
            "build_validation_data_loader returned there yields nothing more. Return a loader "
            "that can be read again, with at least one batch on every rank that needs data"
        )

    def _has_own(self, batches: PeekableIterator | None, index: int) -> bool | None:
        """True if call number `index` has data of this rank's shard; None if this rank has none."""
        if self.own_evaluations is not None and index >= self.own_evaluations:
            return False
        if batches is None:
            return None if self.own_evaluations is None else True
        # With an agreed number, a loader that ends early is a mistake that must be shown.
        return self.agreed_evaluations is not None or batches.has(self.group_size)

    def _all_continue(self, answers: list[bool | None], index: int) -> bool:
        have_data = [answer for answer in answers if answer is not None]
        continues = bool(have_data) and (any(have_data) if self.pads else all(have_data))
        if not continues and index == 0 and not self.pads:
            raise _too_small_error(self.group_size, "fewer than that on some rank")
        return continues


def validation_set(
    adapter: TrialAdapter, loader: Any, seed: int, distributed: DistributedContext
) -> ValidationSet:
    """Shard the validation loader and agree on calls that count. Collective: every rank calls it.

    Raises TrialError on all ranks if a loader is an iterator without a length; or, with pipeline
    parallelism, if a shard has no whole group of micro-batches, or one has fewer samples.
    """
    shard, group_size = loader, adapter.micro_batches_per_evaluation
    if isinstance(loader, DataLoader):  # a custom loader is this rank's shard already
        shard = loader.get_data_loader(
            num_replicas=adapter.data_parallel_size, rank=adapter.data_parallel_rank, seed=seed
        )
    own = length_of(shard)
    may_be_endless = own is None and isinstance(shard, Iterator)
    if shard is not None:
        shard = with_shared_rng(shard, adapter, distributed, seed)
    unusable = type(loader).__name__ if may_be_endless else None
    sizes = None if adapter.pads_evaluation else _sizes(loader)
    ranks = distributed.allgather(
        (shard is not None, own, adapter.data_parallel_rank, sizes, unusable)
    )
    for *_, name in ranks:
        if name is not None:
            raise TrialError(
                f"build_validation_data_loader returned an iterator ({name}) without a length. It "
                "may never end, and a second validation would find it used up. Return an object "
                "whose __iter__ begins a new pass, such as a DataLoader or a list, or give the "
                "iterator a __len__"
            )
    lengths = [(length, rank) for has_data, length, rank, *_ in ranks if has_data]
    known = [length for length, _ in lengths if length is not None]
    has_unknown = len(known) < len(lengths)
    if shard is None:  # a rank without data counts as the ranks of the same shard do
        peers = [length for length, rank in lengths if rank == adapter.data_parallel_rank]
        own = next((length for length in peers if length is not None), None)
    agreed, warning = None, ""
    if adapter.evaluates_in_lockstep and known and not has_unknown:
        counts = [length // group_size for length in known]
        agreed = max(counts) if adapter.pads_evaluation else min(counts)
        if not adapter.pads_evaluation:
            warning = _left_out(known, agreed, group_size)
            if not adapter.takes_smaller_micro_batches:
                for *_, each, _ in ranks:
                    _require_equal(each, adapter.data_parallel_size, agreed * group_size)
    return ValidationSet(
        loader=loader,
        shard=shard,
        seed=seed,
        group_size=group_size,
        data_parallel_rank=adapter.data_parallel_rank,
        in_lockstep=adapter.evaluates_in_lockstep,
        pads=adapter.pads_evaluation,
        own_evaluations=None if own is None else own // group_size,
        agreed_evaluations=agreed,
        warning=warning,
    )


def _too_small_error(group_size: int, seen: str) -> TrialError:
    return TrialError(
        "the validation set is too small for pipeline parallelism, where one evaluate_batch takes "
        f"gradient_accumulation_steps = {group_size} micro-batches from every data-parallel rank: "
        f"the validation loader has {seen}. Give build_validation_data_loader a smaller batch size "
        "or more samples, or lower gradient_accumulation_steps"
    )


def _left_out(lengths: list[int], agreed: int, group_size: int) -> str:
    """What a pipeline leaves out, for people. Raises TrialError if that is all."""
    if agreed == 0:
        raise _too_small_error(group_size, f"{min(lengths)} on some rank")
    left_out = max(lengths) - agreed * group_size
    if not left_out:
        return ""
    return (
        "with pipeline parallelism, validation takes whole groups of gradient_accumulation_steps "
        f"= {group_size} micro-batches: up to {left_out} of {max(lengths)} micro-batches of a "
        "data-parallel rank are left out of each validation"
    )


def _sizes(loader: Any) -> tuple[int, int] | None:
    """The samples of a loader, and of a micro-batch; None if these have all one size, or any."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.drop_last:
        return None
    samples = length_of(loader.sampler)
    if samples is None or samples % loader.batch_size == 0:
        return None
    return samples, loader.batch_size


def _require_equal(sizes: tuple[int, int] | None, ranks: int, taken: int) -> None:
    """Check that a pipeline, which takes `taken` micro-batches of each data-parallel rank, takes no
    smaller one: its stages agree on one shape."""
    if sizes is None:
        return
    samples, per_micro_batch = sizes
    if samples // per_micro_batch // ranks >= taken:  # the last one is left out
        return
    raise TrialError(
        f"the validation set has {samples} samples in micro-batches of {per_micro_batch}, so its "
        f"last one has {samples % per_micro_batch}: the stages of a pipeline exchange activations "
        "of one shape. Give build_validation_data_loader a batch size that divides the samples, "
        "or drop_last=True; or build the PipelineModule with dynamic_shape=True"
    )
