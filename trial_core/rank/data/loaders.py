"""A trial's data loaders: checked, sharded, and set to the position where training continues."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from trial_core.common.text_format import plural
from trial_core.errors import TrialError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.dataloader import DataLoader
from trial_core.rank.data.micro_batch_seeds import with_shared_rng
from trial_core.rank.data.resized_batches import (
    another_size,
    counted_on,
    has_other_length,
    with_other_length,
)
from trial_core.rank.data.sample_lists import SampleLists, differing_ranks, sample_lists
from trial_core.rank.data.seekable_samplers import length_of
from trial_core.rank.data.validation_set import ValidationSet, validation_set
from trial_core.rank.trial.trial_adapter import TrialAdapter
from trial_core.schedule.units import EpochLength

logger = logging.getLogger(__name__)

SampleCounter = Callable[[Any, int], int]
"""The samples of a micro-batch; 0 if unknown. The number is that of the micro-batches that the rank
has taken before, in the whole life of the trial."""


class MicroBatches(Iterator[Any]):
    """A training loader's micro-batches, counted as the trial takes them.

    Args:
        source: micro-batches without end. Nothing is loaded ahead.
        samples_of: see `_counter`.
        drawn: how many this rank has taken before these, over the whole life of the trial.
        loader, loaded: the loader behind `source`, and the state that was loaded into it, if it
            saves its own state.

    Attributes:
        samples, uncounted: of the micro-batches taken; how many of them could not be counted.
        waited_seconds: the time that loading took, without data that was loaded ahead. Ranks train
            in step, so all wait for the rank with the highest value.
    """

    def __init__(
        self,
        source: Iterator[Any],
        per_batch: int,
        samples_of: SampleCounter,
        drawn: int = 0,
        loader: Any = None,
        loaded: Any = None,
    ) -> None:
        self._source = source
        self._per_batch = per_batch
        self._samples_of = samples_of
        self._drawn = self._drawn_before = drawn
        self._loader = loader
        self._loaded = loaded
        self._has_warned = False
        self.taken = self.samples = self.uncounted = 0
        self.waited_seconds = 0.0

    def __next__(self) -> Any:
        began = time.perf_counter()
        micro_batch = next(self._source)
        self.waited_seconds += time.perf_counter() - began
        self.taken += 1
        samples = self._samples_of(micro_batch, self._drawn)
        self.samples += samples
        self.uncounted += not samples
        self._drawn += 1
        return micro_batch

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in the data, for `Loaders.begin`. Call between batches."""
        # Before the first micro-batch, torchdata's loader would begin a pass, and litdata's would
        # name another worker than the one that it has loaded.
        is_moved = self._loader is not None and self._drawn > self._drawn_before
        return {
            "drawn": self._drawn,
            "per_batch": self._per_batch,
            "loader": self._loader.state_dict() if is_moved else self._loaded,
            "loader_type": type(self._loader).__qualname__,
            "loader_is_global": bool(getattr(self._loader, "state_is_global", False)),
        }

    def batch_ended(self) -> None:
        """Warn, once, if the trial has not taken exactly one batch's micro-batches."""
        if self.taken != self._per_batch and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"train_batch took {self.taken} micro-batches from its loader for one batch, where "
                f"gradient_accumulation_steps makes it {self._per_batch}: epochs are counted by "
                "the latter, so they do not begin and end with the passes over the data. If a "
                "batch needs more, load larger micro-batches and divide them in train_batch"
            )
        self.taken = 0


@dataclass
class Loaders:
    """This rank's data. Without training data on a rank that needs none.

    Attributes:
        epoch: the length of an epoch, the same on every rank; None if it is unknown.
        batch_samples: samples of a batch, as the loader of some rank has it, or else the trial;
            None if it is unknown.
        sample_lists: of the training data, for a comparison; empty if there is none.
        training: micro-batches without end, after `begin`.
    """

    adapter: TrialAdapter
    distributed: DistributedContext
    seed: int
    training_loader: Any
    validation: ValidationSet
    epoch: EpochLength | None
    sample_lists: SampleLists = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    batch_samples: int | None = None
    training: MicroBatches | None = None
    _first_epoch: int = 0
    _resized_at: int | None = None

    def count_on(
        self,
        then: EpochLength | None,
        batches_trained: int,
        samples_then: int | None,
        saved: Mapping[str, Any] | None,
        has_other_ranks: bool = False,
        of_trial_then: int = 0,
    ) -> str:
        """Count epochs on from a checkpoint, also if its batches had another size, or its epochs
        another length. Before `begin`.

        Returns the change, for people; empty without one.

        Args:
            then, samples_then, saved: the checkpoint's length of an epoch, samples of a batch, and
                `state_dict`; None if they are not known.
            has_other_ranks: it was saved on another number of data-parallel ranks.
            of_trial_then: samples of a batch as its trial has told them; 0 if it has not.

        Raises CheckpointError if batches of the present size cannot begin here: see `counted_on`.
        """
        samples, epoch = self.batch_samples, self.epoch
        if samples_then is None and samples == self.adapter.batch_samples:
            samples_then = of_trial_then or None
        if samples is not None and samples_then is not None and samples != samples_then:
            sizes = (samples_then, samples)
            if has_other_ranks:
                raise another_size(sizes, "the number of slots has changed, too")
            self.epoch = counted_on(epoch, then, sizes, batches_trained, saved)
            self._resized_at = batches_trained
            return f"training data: batch size {samples_then} -> {samples}, from the next batch on"
        if then is not None and epoch is not None:
            if has_other_length(epoch, then):
                self.epoch = with_other_length(epoch, then, batches_trained)
                self._resized_at = batches_trained
                lengths = " -> ".join(
                    f"{each.micro_batches / each.micro_batches_per_batch:.9g}"
                    for each in (then, epoch)
                )
                return f"training data: batches of an epoch {lengths}, from this epoch on"
            first = (then.first_epoch, then.first_batch)
            self.epoch = replace(epoch, first_epoch=first[0], first_batch=first[1])
        return ""

    def begin(self, saved: Mapping[str, Any] | None = None) -> None:
        """Set the training data to the position of `saved`, a `state_dict`; None is the beginning.

        Like building the loaders, this may draw from the global generators: restore them next.
        """
        adapter, loader = self.adapter, self.training_loader
        if loader is None:
            return
        per_batch, ranks = adapter.micro_batches_per_batch, adapter.data_parallel_size
        drawn = 0
        if saved is not None and self._resized_at is not None and self.epoch is not None:
            self._first_epoch = self.epoch.first_epoch
            drawn = (self._resized_at - self.epoch.first_batch) * per_batch
        elif saved is not None:
            self._first_epoch = int(saved.get("first_epoch", 0))
            warns = adapter.data_parallel_rank == 0
            drawn = micro_batches_drawn(saved, per_batch, ranks, self.epoch, warns)
        endless: Iterable[Any]
        if isinstance(loader, DataLoader):
            endless = loader.get_data_loader(
                repeat=True,
                skip=drawn,
                num_replicas=ranks,
                rank=adapter.data_parallel_rank,
                seed=self.seed,
                epoch=self._first_epoch,
            )
        else:
            endless = _repeat(loader, _rest_of_pass(adapter, loader, drawn, saved))
        endless = with_shared_rng(
            endless, adapter, self.distributed, self.seed, self._first_epoch, drawn
        )
        own = None if isinstance(loader, DataLoader) or not _saves_state(loader) else loader
        loaded = None if own is None or saved is None else saved["loader"]
        counter = _counter(adapter, loader)
        self.training = MicroBatches(iter(endless), per_batch, counter, drawn, own, loaded)

    @property
    def loads_micro_batches(self) -> bool | None:
        """True if the training loader has the engine's micro-batch size; None without a loader."""
        if self.training_loader is None:
            return None
        size = getattr(self.training_loader, "batch_size", None)
        return isinstance(self.training_loader, DataLoader) and size == (
            self.adapter.topology().micro_batch_samples
        )

    def settings(self) -> dict[str, Any]:
        """The settings of the training data, as far as they are known."""
        loader = self.training_loader
        if not isinstance(loader, DataLoader):
            return {}
        found = {
            "samples": length_of(loader.dataset),
            "order": type(loader.sampler).__qualname__,
            "seed": self.seed if loader.generator is None else loader.generator.initial_seed(),
            "batch size": self.batch_samples,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def waited_seconds(self) -> float:
        return 0.0 if self.training is None else self.training.waited_seconds

    def state_dict(self) -> dict[str, Any] | None:
        """This rank's position in the training data; None on a rank that needs no data."""
        if self.training is None:
            return None
        passes = None if self.epoch is None else self.epoch.micro_batches
        ranks = self.adapter.data_parallel_size
        position = {"ranks": ranks, "pass": passes, "first_epoch": self._first_epoch}
        return {**self.training.state_dict(), **position}


def build_loaders(
    adapter: TrialAdapter, distributed: DistributedContext, seed: int, compares_data: bool = True
) -> Loaders:
    """Build both loaders. Collective: every rank calls this. Call `Loaders.begin` next.

    If it `compares_data`, it finds out whether all ranks have the same. Raises TrialError if a
    loader has the wrong type, is empty, or is missing on a rank that needs data; or a pass has
    fewer samples than ranks, or the validation set is too small for a pipeline.
    """
    # A trial may build loaders without asking its rank, so a rank without data never calls it.
    needed = adapter.needs_data
    training = _require_usable(adapter, adapter.training_loader() if needed else None, "training")
    validation = _require_usable(
        adapter, adapter.validation_loader() if needed else None, "validation"
    )
    # All ranks know all lengths before any refuses one, so that all raise the same error.
    found = [
        sample_lists(each) if compares_data and isinstance(each, DataLoader) else None
        for each in (training, validation)
    ]
    lengths = [_micro_batches_of_all(adapter, each) for each in (training, validation)]
    counts = _batch_samples(adapter, training), _samples(training)
    of_ranks = distributed.allgather((*lengths, *counts, *found))
    lengths_of_training, lengths_of_validation, sizes, sets, *lists = zip(*of_ranks, strict=True)
    training_length = _common_length(lengths_of_training, "training")
    _common_length(lengths_of_validation, "validation")
    differing = [*map(differing_ranks, lists, ("training", "validation"))]

    epoch = None
    if training_length is not None:
        epoch = EpochLength(
            training_length, adapter.micro_batches_per_batch * adapter.data_parallel_size
        )
    shards = validation_set(adapter, validation, seed, distributed)
    samples, in_set = (max(filter(None, each), default=None) for each in (sizes, sets))
    short = _short_batches(adapter, samples, in_set, getattr(training, "drop_last", False))
    warnings = [each for each in (*differing, short, shards.warning) if each]
    return Loaders(
        adapter, distributed, seed, training, shards, epoch, found[0] or {}, warnings, samples
    )


def _batch_samples(adapter: TrialAdapter, loader: Any) -> int | None:
    """Samples of a batch on all ranks, if the loader tells them; without a ``batch_size``, the
    trial's number."""
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_size is None:
        return adapter.batch_samples or None
    return loader.batch_size * adapter.micro_batches_per_batch * adapter.data_parallel_size


def _samples(loader: Any) -> int | None:
    """Samples of one pass over a loader; None if they or their batches are not known."""
    known = isinstance(loader, DataLoader) and loader.batch_size is not None
    return length_of(loader.sampler) if known else None


def _counter(adapter: TrialAdapter, loader: Any) -> SampleCounter:
    """Counts by the place in the pass, if the loader tells sizes; else the trial counts."""
    samples = _samples(loader)
    if samples is None:
        return lambda micro_batch, _: adapter.samples_in(micro_batch)
    size, in_pass = int(loader.batch_size), int(loader.num_micro_batches)
    last = min(size, samples - (in_pass - 1) * size)
    ranks, behind = adapter.data_parallel_size, adapter.data_parallel_rank + 1
    return lambda _, drawn: size if (drawn * ranks + behind) % in_pass else last


def _short_batches(
    adapter: TrialAdapter, per_batch: int | None, samples: int | None, drops_last: bool
) -> str:
    """What the batches of a small or uneven training set lack, for people; empty: nothing.

    Raises TrialError if a pass has fewer samples than there are ranks.
    """
    if per_batch is None or samples is None:
        return ""
    ranks = adapter.data_parallel_size
    parts = ranks * adapter.micro_batches_per_batch
    rest = samples % (per_batch // parts)
    if samples < ranks:
        raise TrialError(
            f"a pass over the training data has {plural(samples, 'sample')}, and there are {ranks} "
            "ranks: several would train on the same one; train on fewer slots"
        )
    if samples < per_batch:
        return (
            f"a pass over the training data has {plural(samples, 'sample')}, fewer than a batch of "
            f"{per_batch}: batches take samples of several passes"
            + ", or hold fewer"
            * bool(rest and not drops_last)
        )
    if parts == 1 or drops_last or not rest:
        return ""
    return (
        f"the last micro-batch of a pass over the training data has {plural(rest, 'sample')}, the "
        f"others {per_batch // parts}: its gradient counts as much as theirs; drop_last=True "
        "leaves it out"
    )


def _require_usable(adapter: TrialAdapter, loader: Any, which: str) -> Any:
    if loader is None and adapter.needs_data:
        raise TrialError(
            f"build_{which}_data_loader returned None on a rank that needs data; return a "
            "trial_core.pytorch.DataLoader"
        )
    if (
        loader is not None
        and adapter.requires_reproducible_loaders
        and not isinstance(loader, DataLoader)
    ):
        raise TrialError(
            f"build_{which}_data_loader returned {type(loader).__module__}."
            f"{type(loader).__qualname__}; return a trial_core.pytorch.DataLoader, which shards, "
            "shuffles and resumes reproducibly, or call "
            "context.disable_dataset_reproducibility_checks() to take care of that yourself"
        )
    return loader


def _micro_batches_of_all(adapter: TrialAdapter, loader: Any) -> int | None:
    """Micro-batches of one pass over all shards; -1 without a loader, None without a length."""
    if loader is None:
        return -1
    if isinstance(loader, DataLoader):
        return loader.num_micro_batches
    own = length_of(loader)  # a custom loader gives this rank's shard alone
    return None if own is None else own * adapter.data_parallel_size


def _common_length(lengths: Sequence[int | None], which: str) -> int | None:
    known = [length for length in lengths if length is not None and length >= 0]
    if 0 in known:
        raise TrialError(
            f"the {which} loader is empty: it has no batch at all; its dataset has no samples, or "
            "fewer than one batch with drop_last=True"
        )
    return None if None in lengths or not known else max(known)


def _saves_state(loader: Any) -> bool:
    """True if a custom loader can save and restore its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _rest_of_pass(
    adapter: TrialAdapter, loader: Any, drawn: int, saved: Mapping[str, Any] | None
) -> Iterator[Any] | None:
    """The rest of the pass in which `loader` was saved; None if a new pass begins."""
    state = None if saved is None else saved["loader"]
    if state is not None and _saves_state(loader):
        loader.load_state_dict(copy.deepcopy(state))  # some loaders keep it, and change it
        complete_litdata_state(loader)
        # iter() now: the uninterrupted run drew its random numbers earlier, and the random state
        # is restored after this.
        rest: Iterator[Any] = iter(loader)
        return rest
    if drawn > 0 and adapter.data_parallel_rank == 0:  # the other ranks would log the same
        why = (
            "the checkpoint holds no state of it"
            if _saves_state(loader)
            else "it has no state_dict and load_state_dict. To resume within an epoch, return a "
            "trial_core.pytorch.DataLoader or, for example, torchdata's StatefulDataLoader"
        )
        logger.warning(
            f"the training loader ({type(loader).__module__}.{type(loader).__qualname__}) restarts "
            f"at its first micro-batch, although {drawn} have been trained on: {why}"
        )
    return None


def _repeat(loader: Any, rest: Iterator[Any] | None) -> Iterator[Any]:
    """Repeat a custom loader without end: an epoch's end does not end the run."""
    if rest is not None:
        yield from rest  # empty if the loader was saved at the end of a pass
    while True:
        count = 0
        for count, micro_batch in enumerate(loader, start=1):  # noqa: B007 - read after the loop
            yield micro_batch
        if count == 0:
            raise TrialError("the training loader yielded nothing in a whole pass")


def micro_batches_drawn(
    saved: Mapping[str, Any],
    per_batch: int,
    ranks: int,
    epoch: EpochLength | None,
    warns: bool = True,
) -> int:
    """How many micro-batches of the present size each rank has drawn.

    The size of a batch stays the same, but a resumed run may divide it into other micro-batches.
    An epoch then has the same samples, but not always a proportional number of micro-batches:
    its last micro-batch may be smaller. `saved` is the `Loaders.state_dict` of any rank; the other
    arguments are this run's. Only one rank `warns` of repeated samples.
    """
    ranks_then = int(saved["ranks"])
    # How many of the present micro-batches one earlier micro-batch makes.
    ratio = Fraction(per_batch * ranks, int(saved["per_batch"]) * ranks_then)
    drawn_then = int(saved["drawn"]) * ranks_then
    pass_then = saved["pass"]
    if ratio == 1 or pass_then is None or epoch is None:
        position = drawn_then * ratio
    else:
        passes, within = divmod(drawn_then, int(pass_then))
        position = passes * epoch.micro_batches + within * ratio
    drawn = math.floor(position / ranks)
    repeated = position - drawn * ranks
    if repeated and warns:
        logger.warning(
            f"training repeats the samples of {float(repeated):.3g} micro-batch(es): the "
            f"micro-batch size has changed, and a round of micro-batches on {ranks} ranks does not "
            "begin where the last batch ended"
        )
    return drawn


def complete_litdata_state(loader: Any) -> None:
    """Let litdata's loader save right states after `load_state_dict`. Call before `iter`.

    As of litdata 0.2.76, with workers, the datasets of this process, from which `state_dict` takes
    its values, are not set; only their copies in the workers are. So the next state names the first
    epoch, and a resume from it has that epoch's order. After another division of the data (ranks,
    workers or batch size) it also counts only the data taken since, which cannot be mended here.
    Raises TrialError if the loader has workers and divides the rest of the pass anew.
    """
    if not any(cls.__module__.startswith("litdata.") for cls in type(loader).__mro__):
        return
    if loader.num_workers and getattr(loader.dataset, "_elastic_drop_first", None) is not None:
        raise TrialError(
            f"{type(loader).__name__} of litdata has num_workers={loader.num_workers} and a state "
            "of another number of ranks or workers, or of another batch size; the next checkpoint "
            "would repeat samples. Resume with the numbers of the run that saved it, or with "
            "num_workers=0 until a checkpoint of the next pass over the data"
        )
    # A dataset that combines others has them in `_datasets`.
    for dataset in (loader.dataset, *getattr(loader.dataset, "_datasets", ())):
        if hasattr(dataset, "current_epoch"):
            dataset.current_epoch = loader.current_epoch
