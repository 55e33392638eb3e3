"""`DataLoader`: describes what to load and how; the controller chooses shard and position.

Follows ``determined.pytorch.DataLoader``, and also takes iterable datasets.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils import data

from trial_core.errors import TrialError
from trial_core.rank.data.iterable import ShardedIterable, micro_batches_in
from trial_core.rank.data.micro_batch_seeds import SeededBatches, epoch_setters
from trial_core.rank.data.samplers import adapt_batch_sampler
from trial_core.rank.data.seekable_samplers import length_of
from trial_core.rank.trial.seeding import generator_for


class DataLoader:
    """A dataset, how to sample micro-batches from it, and how to load them.

    Follows ``determined.pytorch.DataLoader``, with torch's arguments, defaults and errors. It loads
    nothing itself: the controller calls `get_data_loader` with this rank's shard and the number of
    micro-batches that the rank has consumed. Outside a run, iterating over a `DataLoader` loads the
    whole dataset, and each iteration is the next epoch.

    **What is reproducible.** The order depends only on (seed, epoch), even with a user's sampler or
    batch sampler. Loading draws nothing from the global generators of Python, numpy or torch. A
    resumed run continues with the next micro-batch of the uninterrupted run, and random
    augmentations are the same:

    * with ``num_workers=0`` they draw from the global generators, which checkpoints restore;
    * with workers, augmentations of a map-style dataset draw from the worker's global generators,
      which are seeded for each micro-batch by (seed, its position in the sequence of all ranks).

    In training, the ``set_epoch`` of a map-style dataset (or of those in a ``Subset`` or
    ``ConcatDataset``) is called with the number of each epoch before it is loaded, in the workers
    too. It needs the same conditions as the seeds of workers.

    Not reproducible are generators that a dataset or ``worker_init_fn`` creates itself and that
    advance from sample to sample. With workers there are three more cases: a ``batch_size`` of
    None, batch samplers whose batches are not lists, and a dataset whose ``__getitems__`` does not
    iterate over its indices. Workers are then seeded only at their start, by (seed, rank, skipped
    micro-batches). Random numbers of an iterable dataset itself are always reproducible (see
    `ShardedIterable`).

    Args:
        dataset: map-style, or a ``torch.utils.data.IterableDataset`` that gives all its samples to
            every rank; see `ShardedIterable`.
        batch_size: samples in a micro-batch. If None, the dataset gives whole micro-batches.
        shuffle: use a new order in every epoch.
        sampler: order of the samples; excludes `shuffle`. Must not be sharded.
        batch_sampler: gives lists of indices; excludes `batch_size`, `shuffle`, `sampler` and
            `drop_last`. With ``set_epoch`` and ``__len__``, a resumed run enters the epoch
            directly; otherwise it reads the sampler's earlier batches, but not the dataset. The
            same holds for `sampler`.
        num_workers: loader processes of each rank; 0 loads in the rank's process.
        collate_fn: makes a micro-batch of a list of samples.
        pin_memory: copy tensors into page-locked memory.
        drop_last: leave out an epoch's last micro-batch if it is smaller.
        timeout: seconds to wait for a worker; 0 waits without limit.
        worker_init_fn: called in each worker with its number, after seeding. With an iterable
            dataset, ``get_worker_info().dataset`` is a wrapper; its ``dataset`` is the user's.
        multiprocessing_context: how workers are started.
        generator: its ``initial_seed()`` replaces the experiment's seed. Nothing is drawn from it.
            Must have the same seed on all ranks.
        prefetch_factor: micro-batches that each worker loads ahead. Default: 2, or None without
            workers.
        persistent_workers: keep workers from one epoch to the next.

    Raises:
        ValueError: arguments that torch refuses, with torch's message.
        TypeError: likewise.
    """

    def __init__(
        self,
        dataset: data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        # torch's loader checks the arguments and knows the defaults. It is never iterated over, so
        # it starts no worker and draws no random numbers.
        plain: data.DataLoader[Any] = data.DataLoader(
            dataset,
            batch_size=batch_size,
            # torch refuses to shuffle an empty dataset; the controller's error says more.
            shuffle=shuffle and length_of(dataset) != 0,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.dataset = dataset
        self.batch_size = plain.batch_size
        self.sampler = plain.sampler
        self.batch_sampler = plain.batch_sampler
        self.num_workers = num_workers
        self.collate_fn = plain.collate_fn
        self.pin_memory = pin_memory
        self.drop_last = plain.drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = plain.multiprocessing_context
        self.generator = generator
        self.prefetch_factor = plain.prefetch_factor
        self.persistent_workers = persistent_workers
        self._next_epoch = 0

    def get_data_loader(
        self,
        repeat: bool = False,
        skip: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        seed: int = 0,
        epoch: int = 0,
    ) -> data.DataLoader[Any]:
        """A torch loader for one data-parallel rank: repeat -> shard -> skip.

        Micro-batch *g* of the sequence that all ranks share goes to rank ``g % num_replicas``.
        Nothing is padded or dropped, so without `repeat` some ranks may get one more than others;
        ``len()`` of the result is the number that this rank gets. With `repeat` it is the rank's
        share of one epoch, rounded if the ranks do not divide the epoch.

        Args:
            repeat: repeat the epochs without end. If False, each ``iter()`` of the result gives the
                same epoch.
            skip: number of micro-batches that this rank has consumed, in all epochs.
            num_replicas: number of data-parallel ranks.
            rank: index of this data-parallel rank.
            seed: the experiment's seed; the same on all ranks.
            epoch: the first epoch; `skip` counts from its beginning.

        Raises:
            TrialError: the sampler is sharded already, or the dataset needs a length and has none.
            ValueError: `skip` or `rank` is out of range.
        """
        if self.generator is not None:
            seed = self.generator.initial_seed()
        if isinstance(self.dataset, data.IterableDataset):
            return self._iterable_loader(repeat, skip, num_replicas, rank, seed, epoch)
        chain = adapt_batch_sampler(self._order(), repeat, skip, num_replicas, rank, seed=seed)
        setters = epoch_setters(self.dataset) if repeat else []
        if self.num_workers or setters:
            first, per_epoch = skip * num_replicas + rank, self.num_micro_batches
            chain = SeededBatches(
                chain, seed, first, num_replicas,
                per_epoch if setters else None, () if self.num_workers else setters,
            )  # fmt: skip
        chain.set_epoch(epoch)
        options = self._loading_options(seed, rank, skip)
        if self.batch_sampler is None:
            return data.DataLoader(self.dataset, batch_size=None, sampler=chain, **options)
        return data.DataLoader(self.dataset, batch_sampler=chain, **options)

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches in one epoch, all ranks together; None if unknown."""
        if isinstance(self.dataset, data.IterableDataset):
            return micro_batches_in(self.dataset, self.batch_size, self.drop_last)
        return length_of(self.sampler if self.batch_sampler is None else self.batch_sampler)

    def __len__(self) -> int:
        """Micro-batches in one epoch, all ranks together.

        Raises:
            TypeError: the number is unknown.
        """
        length = self.num_micro_batches
        if length is None:
            raise TypeError("this DataLoader has no len(): its dataset or sampler has none")
        return length

    def __iter__(self) -> Iterator[Any]:
        """The whole dataset once, in the order of the next epoch. For use outside a run."""
        epoch = self._next_epoch
        self._next_epoch += 1
        return iter(self.get_data_loader(epoch=epoch))

    def _order(self) -> Any:
        """The sampler of micro-batches, or of samples if batch_size is None."""
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        innermost = getattr(order, "sampler", order)
        if type(innermost) is data.SequentialSampler and length_of(innermost) is None:
            raise TrialError(
                f"{type(self.dataset).__qualname__} has no len(), so the DataLoader does not know "
                "its indices; give it a __len__, give the DataLoader a sampler, or derive the "
                "dataset from torch.utils.data.IterableDataset"
            )
        return order

    def _iterable_loader(
        self, repeat: bool, skip: int, num_replicas: int, rank: int, seed: int, epoch: int
    ) -> data.DataLoader[Any]:
        if skip < 0 or not 0 <= rank < num_replicas:
            raise ValueError(
                "a shard needs skip >= 0 and 0 <= rank < num_replicas, got "
                f"skip={skip}, rank={rank} and num_replicas={num_replicas}"
            )
        sharded = ShardedIterable(
            dataset=self.dataset,  # type: ignore[arg-type]  # checked by the caller
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            repeat=repeat,
            skip=skip,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            epoch=epoch,
        )
        # It makes the lists of samples, so that no micro-batch contains samples of two epochs.
        return data.DataLoader(sharded, batch_size=None, **self._loading_options(seed, rank, skip))

    def _loading_options(self, seed: int, rank: int, skip: int) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "collate_fn": self.collate_fn,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
            "worker_init_fn": partial(init_worker, self.worker_init_fn),
            "multiprocessing_context": self.multiprocessing_context,
            # Without a generator, iter() draws the workers' seed from the global one.
            "generator": generator_for(seed, "workers", rank, skip),
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
        }


def init_worker(user_init: Callable[[int], None] | None, worker: int) -> None:
    """The ``worker_init_fn`` of every loader: a worker ignores SIGTERM unless its rank sends it."""
    rank_process = multiprocessing.parent_process()
    if rank_process is not None and rank_process.pid is not None:
        _accept_sigterm_only_from(rank_process.pid)
    if user_init is not None:
        user_init(worker)


def _accept_sigterm_only_from(rank_pid: int) -> None:
    """Make SIGTERM end this process only if process `rank_pid` sent it.

    Launchers and service managers signal all processes of a stopped run. The rank then finishes its
    batch, and needs its workers for that. A process learns the sender only if it waits for the
    signal, and it can wait only for a blocked signal; programs that a worker starts inherit the
    block. Where waiting is not possible (macOS), every SIGTERM ends the worker.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
