"""A trial's data loaders, checked, sharded and set to where training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.controller.data.data_position import drawn_here
from trial_core.controller.data.data_rng import drawn_alike
from trial_core.controller.data.validation_set import ValidationSet, length, validation_set
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.data.dataloader import DataLoader
from trial_core.units import EpochLength

logger = logging.getLogger(__name__)


class MicroBatches(Iterator[Any]):
    """A training loader's micro-batches, counted as the trial takes them.

    Args:
        source: micro-batches without end. Loads none ahead.
        per_batch: how many of them are one batch's.
        drawn: how many this rank has taken before these, over the whole life of the trial.
        loader: where they come from, if it carries its own state; None otherwise.

    Attributes:
        waited_seconds: how long it took to load those that were taken, as far as loading was not
            done ahead: in step, what all ranks wait for is the rank that waits longest here.
    """

    def __init__(
        self, source: Iterator[Any], per_batch: int, drawn: int = 0, loader: Any = None
    ) -> None:
        self._source = source
        self._per_batch = per_batch
        self._drawn = drawn
        self._loader = loader
        self._warned = False
        self.taken = 0
        self.waited_seconds = 0.0

    def __next__(self) -> Any:
        began = time.perf_counter()
        micro_batch = next(self._source)
        self.waited_seconds += time.perf_counter() - began
        self.taken += 1
        self._drawn += 1
        return micro_batch

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's data stands, for `Loaders.begin`. To be called between batches."""
        # Before anything was drawn there is nothing to keep, and asking would begin a pass.
        keeps = self._loader is not None and self._drawn > 0
        return {
            "drawn": self._drawn,
            "per_batch": self._per_batch,
            "loader": self._loader.state_dict() if keeps else None,
        }

    def batch_ended(self) -> None:
        """Warn, once, if the trial has taken more or fewer than one batch's."""
        if self.taken != self._per_batch and not self._warned:
            self._warned = True
            logger.warning(
                "train_batch took %d micro-batches from its loader for one batch, where "
                "gradient_accumulation_steps makes it %d: epochs are counted by the latter, and so "
                "they begin and end elsewhere than the passes over the data. If a batch needs "
                "more, load larger micro-batches and divide them in train_batch",
                self.taken,
                self._per_batch,
            )
        self.taken = 0


@dataclass
class Loaders:
    """This rank's data.

    Attributes:
        engine, distributed, seed: what they were built with.
        training_loader: what the trial built; None on a rank that needs no data.
        validation: the rank's part of the validation set.
        epoch: how long an epoch is, the same on every rank; None when there is no telling.
        training: micro-batches without end, once they were begun; None likewise.
    """

    engine: TrialEngine
    distributed: DistributedContext
    seed: int
    training_loader: Any
    validation: ValidationSet
    epoch: EpochLength | None
    training: MicroBatches | None = None

    def begin(self, batches_trained: int, saved: Mapping[str, Any] | None = None) -> None:
        """Set the training data to where training goes on.

        What that draws from the global generators, like what building the loaders does, is no
        part of training's random state: restore that after this.

        Args:
            saved: what `state_dict` gave there; None at the beginning, and for a checkpoint that
                does not have it: then that many whole batches of micro-batches are skipped.
        """
        self.training = _endless(self, batches_trained, saved)

    @property
    def waited_seconds(self) -> float:
        """How long this rank has waited for its training data; 0 on a rank that needs none."""
        return 0.0 if self.training is None else self.training.waited_seconds

    def state_dict(self) -> dict[str, Any] | None:
        """Where this rank's training data stands; None on a rank that needs none."""
        if self.training is None:
            return None
        passes = None if self.epoch is None else self.epoch.micro_batches
        ranks = self.engine.data_parallel_size
        return {**self.training.state_dict(), "ranks": ranks, "pass": passes}


def build_loaders(engine: TrialEngine, distributed: DistributedContext, seed: int) -> Loaders:
    """Build both loaders, not begun yet. Collective: every rank calls this.

    Raises:
        TrialError: a loader of the wrong type, an empty one, one missing where data is needed, or
            a validation set too small for a pipeline.
    """
    # A rank that needs no data is not asked for any: its trial may build loaders all the same.
    needed = engine.needs_data
    training = _checked(engine, engine.training_loader() if needed else None, "training")
    validation = _checked(engine, engine.validation_loader() if needed else None, "validation")
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
    parts = validation_set(engine, validation, seed, distributed)
    return Loaders(engine, distributed, seed, training, parts, epoch)


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
    loaders: Loaders, batches_trained: int, saved: Mapping[str, Any] | None
) -> MicroBatches | None:
    engine, loader = loaders.engine, loaders.training_loader
    if loader is None:
        return None
    per_batch, ranks = engine.micro_batches_per_batch, engine.data_parallel_size
    drawn = batches_trained * per_batch
    if saved is not None:
        drawn = drawn_here(saved, per_batch, ranks, loaders.epoch, engine.data_parallel_rank == 0)
    endless: Iterable[Any]
    if isinstance(loader, DataLoader):
        endless = loader.get_data_loader(
            repeat=True,
            skip=drawn,
            num_replicas=ranks,
            rank=engine.data_parallel_rank,
            seed=loaders.seed,
        )
    else:
        endless = _again_and_again(loader, _rest_of_pass(engine, loader, drawn, saved))
    endless = drawn_alike(endless, engine, loaders.distributed, loaders.seed, drawn)
    carries = not isinstance(loader, DataLoader) and _carries_state(loader)
    return MicroBatches(iter(endless), per_batch, drawn, loader if carries else None)


def _carries_state(loader: Any) -> bool:
    """Whether a loader of the trial's own can tell where it stands, and be set there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _rest_of_pass(
    engine: TrialEngine, loader: Any, drawn: int, saved: Mapping[str, Any] | None
) -> Iterator[Any] | None:
    """What is left of the pass that `loader` was saved in; None if it begins with a new one."""
    state = None if saved is None else saved["loader"]
    if state is not None and _carries_state(loader):
        loader.load_state_dict(state)
        # Begun at once: what that draws at random, the uninterrupted run did not draw here, and
        # the random state is restored after this.
        rest: Iterator[Any] = iter(loader)
        return rest
    if drawn > 0 and engine.data_parallel_rank == 0:  # the others would say the same
        logger.warning(
            "the training loader (%s.%s) begins again with its first micro-batch, although %d have "
            "been trained on: %s",
            type(loader).__module__,
            type(loader).__qualname__,
            drawn,
            "the checkpoint holds no state of it"
            if _carries_state(loader)
            else "it has no state_dict and load_state_dict. Return a trial_core.pytorch.DataLoader "
            "or, for instance, torchdata's StatefulDataLoader to go on in the middle of an epoch",
        )
    return None


def _again_and_again(loader: Any, rest: Iterator[Any] | None) -> Iterator[Any]:
    """A custom loader that ends starts over: an epoch's end is not the run's."""
    if rest is not None:
        yield from rest  # nothing, if it was saved with the last micro-batch of a pass
    while True:
        count = 0
        for count, micro_batch in enumerate(loader, start=1):  # noqa: B007 - read after the loop
            yield micro_batch
        if count == 0:
            raise TrialError("the training loader yielded nothing in a whole pass")
