"""A trial's data loaders, checked, sharded and set to where training goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trial_core.controller.engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.dataloader import DataLoader
from trial_core.units import EpochLength


@dataclass
class Loaders:
    """This rank's data.

    Attributes:
        training: micro-batches without end, from where training goes on; None without need.
        validation: the rank's shard of the validation set; None without need.
        epoch: how long an epoch is, the same on every rank; None when there is no telling.
        validation_steps: `evaluate_batch` calls that this rank's shard is good for.
        lockstep_steps: calls that every rank must make, where a forward pass needs all ranks.
    """

    training: Iterator[Any] | None
    validation: Any
    epoch: EpochLength | None
    validation_steps: int
    lockstep_steps: int

    def validation_batches(self) -> Iterator[Any] | None:
        """One pass over the rank's shard; without end where ranks must keep in step."""
        if self.validation is None:
            return None
        batches: Iterator[Any] = iter(self.validation)
        if self.lockstep_steps <= self.validation_steps:
            return batches
        return itertools.chain(batches, itertools.cycle(self._first_of_validation()))

    def _first_of_validation(self) -> list[Any]:
        return list(itertools.islice(iter(self.validation), 1))


def build_loaders(
    engine: TrialEngine, distributed: DistributedContext, batches_trained: int, seed: int
) -> Loaders:
    """Build both loaders. Collective: every rank calls this.

    Args:
        batches_trained: where training goes on; that many batches of micro-batches are skipped.

    Raises:
        TrialError: a loader of the wrong type, an empty one, or one missing where data is needed.
    """
    training = _checked(engine, engine.training_loader(), "training")
    validation = _checked(engine, engine.validation_loader(), "validation")
    # Agreed over all ranks before anything is refused, so that all refuse alike.
    lengths = distributed.allgather((_micro_batches(training), _micro_batches(validation)))
    training_length = _agreed([length for length, _ in lengths], "training")
    _agreed([length for _, length in lengths], "validation")

    epoch = None
    if training_length is not None:
        epoch = EpochLength(
            training_length, engine.micro_batches_per_batch * engine.data_parallel_size
        )
    shard = _sharded(engine, validation, seed)
    steps = engine.evaluation_steps(len(shard)) if shard is not None else 0
    return Loaders(
        training=_endless(engine, training, batches_trained, seed),
        validation=shard,
        epoch=epoch,
        validation_steps=steps,
        lockstep_steps=max(distributed.allgather(steps)) if engine.evaluates_in_lockstep else 0,
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


def _micro_batches(loader: Any) -> int | None:
    """Micro-batches of one pass over all shards; -1 for no loader, None for no length."""
    if loader is None:
        return -1
    if isinstance(loader, DataLoader):
        return loader.num_micro_batches
    try:
        return len(loader)
    except TypeError:
        return None


def _agreed(lengths: list[int | None], which: str) -> int | None:
    known = [length for length in lengths if length is not None and length >= 0]
    if 0 in known:
        raise TrialError(
            f"the {which} loader is empty: it has no batch at all; its dataset has no samples, or "
            "fewer than one batch with drop_last=True"
        )
    return None if None in lengths or not known else max(known)


def _sharded(engine: TrialEngine, loader: Any, seed: int) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    return loader.get_data_loader(
        repeat=False,
        skip=0,
        num_replicas=engine.data_parallel_size,
        rank=engine.data_parallel_rank,
        seed=seed,
    )


def _endless(
    engine: TrialEngine, loader: Any, batches_trained: int, seed: int
) -> Iterator[Any] | None:
    if loader is None:
        return None
    if not isinstance(loader, DataLoader):
        return _again_and_again(loader)
    return iter(
        loader.get_data_loader(
            repeat=True,
            skip=batches_trained * engine.micro_batches_per_batch,
            num_replicas=engine.data_parallel_size,
            rank=engine.data_parallel_rank,
            seed=seed,
        )
    )


def _again_and_again(loader: Any) -> Iterator[Any]:
    """A custom loader that ends starts over: an epoch's end is not the run's."""
    while True:
        count = 0
        for count, micro_batch in enumerate(loader, start=1):  # noqa: B007 - read after the loop
            yield micro_batch
        if count == 0:
            raise TrialError("the training loader yielded nothing in a whole pass")
