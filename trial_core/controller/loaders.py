"""A trial's data loaders, checked, sharded and set to where training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trial_core.controller.drawing import drawn_alike
from trial_core.controller.engine import TrialEngine
from trial_core.controller.validation_set import ValidationSet, length, validation_set
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.dataloader import DataLoader
from trial_core.units import EpochLength

logger = logging.getLogger(__name__)


class MicroBatches(Iterator[Any]):
    """A training loader's micro-batches, counted as the trial takes them."""

    def __init__(self, source: Iterator[Any], per_batch: int) -> None:
        self._source = source
        self._per_batch = per_batch
        self._warned = False
        self.taken = 0

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._source)

    def batch_ended(self) -> None:
        """Warn, once, if the trial has taken more or fewer than one batch's."""
        if self.taken != self._per_batch and not self._warned:
            self._warned = True
            logger.warning(
                "train_batch took %d micro-batches from its loader for one batch, where "
                "gradient_accumulation_steps makes it %d: epochs are counted by the latter, and "
                "a resumed trial goes on at another place in the data. If a batch needs more, "
                "load larger micro-batches and divide them in train_batch",
                self.taken,
                self._per_batch,
            )
        self.taken = 0


@dataclass
class Loaders:
    """This rank's data.

    Attributes:
        training: micro-batches without end, from where training goes on; None without need.
        validation: the rank's part of the validation set.
        epoch: how long an epoch is, the same on every rank; None when there is no telling.
    """

    training: MicroBatches | None
    validation: ValidationSet
    epoch: EpochLength | None


def build_loaders(
    engine: TrialEngine, distributed: DistributedContext, batches_trained: int, seed: int
) -> Loaders:
    """Build both loaders. Collective: every rank calls this.

    Args:
        batches_trained: where training goes on; that many batches of micro-batches are skipped.

    Raises:
        TrialError: a loader of the wrong type, an empty one, one missing where data is needed, or
            a validation set too small for a pipeline.
    """
    training = _checked(engine, engine.training_loader(), "training")
    validation = _checked(engine, engine.validation_loader(), "validation")
    # Agreed over all ranks before anything is refused, so that all refuse alike.
    sizes = distributed.allgather(
        (_micro_batches(engine, training), _micro_batches(engine, validation))
    )
    training_length = _agreed([size for size, _ in sizes], "training")
    _agreed([size for _, size in sizes], "validation")

    epoch = None
    if training_length is not None:
        epoch = EpochLength(
            training_length, engine.micro_batches_per_batch * engine.data_parallel_size
        )
    return Loaders(
        training=_endless(engine, training, distributed, batches_trained, seed),
        validation=validation_set(engine, validation, seed, distributed),
        epoch=epoch,
    )


def _checked(engine: TrialEngine, loader: Any, which: str) -> Any:
    if loader is None and engine.needs_data:
        raise TrialError(
            f"build_{which}_data_loader returned None on a rank that needs data; return a "
            "trial_core.pytorch.DataLoader"
        )
    if (
        loader is not None
        and engine.requires_reproducible_loaders
        and not isinstance(loader, DataLoader)
    ):
        raise TrialError(
            f"build_{which}_data_loader returned {type(loader).__module__}."
            f"{type(loader).__qualname__}; return a trial_core.pytorch.DataLoader, which shards, "
            "shuffles and resumes reproducibly, or call "
            "context.disable_dataset_reproducibility_checks() to take care of that yourself"
        )
    return loader


def _micro_batches(engine: TrialEngine, loader: Any) -> int | None:
    """Micro-batches of one pass over all shards; -1 for no loader, None for no length."""
    if loader is None:
        return -1
    if isinstance(loader, DataLoader):
        return loader.num_micro_batches
    own = length(loader)  # a loader of the trial's own gives this rank's shard alone
    return None if own is None else own * engine.data_parallel_size


def _agreed(lengths: list[int | None], which: str) -> int | None:
    known = [length for length in lengths if length is not None and length >= 0]
    if 0 in known:
        raise TrialError(
            f"the {which} loader is empty: it has no batch at all; its dataset has no samples, or "
            "fewer than one batch with drop_last=True"
        )
    return None if None in lengths or not known else max(known)


def _endless(
    engine: TrialEngine,
    loader: Any,
    distributed: DistributedContext,
    batches_trained: int,
    seed: int,
) -> MicroBatches | None:
    if loader is None:
        return None
    skip = batches_trained * engine.micro_batches_per_batch
    endless: Iterable[Any]
    if isinstance(loader, DataLoader):
        endless = loader.get_data_loader(
            repeat=True,
            skip=skip,
            num_replicas=engine.data_parallel_size,
            rank=engine.data_parallel_rank,
            seed=seed,
        )
    else:
        endless = _again_and_again(loader)
    endless = drawn_alike(endless, engine, distributed, seed, skip)
    return MicroBatches(iter(endless), engine.micro_batches_per_batch)


def _again_and_again(loader: Any) -> Iterator[Any]:
    """A custom loader that ends starts over: an epoch's end is not the run's."""
    while True:
        count = 0
        for count, micro_batch in enumerate(loader, start=1):  # noqa: B007 - read after the loop
            yield micro_batch
        if count == 0:
            raise TrialError("the training loader yielded nothing in a whole pass")
