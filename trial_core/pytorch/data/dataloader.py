"""`DataLoader`: what to load and how; the controller decides which part, from where on.

Follows ``determined.pytorch.DataLoader``, and covers iterable datasets besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils import data

from trial_core.errors import TrialError
from trial_core.pytorch.data.index_streams import length_of
from trial_core.pytorch.data.iterable import ShardedIterable, micro_batches_in
from trial_core.pytorch.data.loader_workers import begin_worker
from trial_core.pytorch.data.samplers import adapt_batch_sampler
from trial_core.pytorch.data.worker_seeds import SeededBatches
from trial_core.pytorch.seeding import generator_for


class DataLoader:
    """A dataset, how to sample micro-batches from it, and how to load them.

    Takes torch's arguments, with torch's defaults and torch's errors. No loading happens here: the
    controller calls `get_data_loader`, with this rank's shard and with what it has seen already.
    Iterating over a `DataLoader` itself, outside of any run, loads everything, epoch after epoch.

    **What is reproducible.** The order is a pure function of (seed, epoch), whether the dataset is
    shuffled, or has a sampler or batch sampler of the user's own. Nothing here draws from the
    global generators of Python, numpy or torch. A resumed run goes on with the very micro-batch
    that the uninterrupted run would have seen, and so do random augmentations:

    * with ``num_workers=0`` they draw from the global generators, which checkpoints restore;
    * with workers, a map-style dataset's draw from the worker's global generators, which are
      seeded for each micro-batch by (seed, its place in the sequence of all ranks).

    Not covered: generators that a dataset or ``worker_init_fn`` makes for itself and that advance
    from sample to sample; with workers also a ``batch_size`` of None, batch samplers whose batches
    are not lists, and a dataset's ``__getitems__`` that does not iterate over its indices: there,
    workers are seeded only when they start, by (seed, rank, micro-batches skipped). What an
    iterable dataset itself draws is always covered (see `ShardedIterable`).

    Args:
        dataset: map-style, or a ``torch.utils.data.IterableDataset``, which must give all its
            samples to every rank; see `ShardedIterable`.
        batch_size: samples in a micro-batch. None: the dataset gives whole micro-batches.
        shuffle: a new order in every epoch.
        sampler: order of the samples; excludes `shuffle`. Not a sharding one.
        batch_sampler: gives lists of indices; excludes `batch_size`, `shuffle`, `sampler` and
            `drop_last`. With ``set_epoch`` and ``__len__``, resuming enters it directly; otherwise
            resuming goes through its earlier batches (not through the dataset). So with `sampler`.
        num_workers: loader processes for each rank; 0 loads in the rank's own process.
        collate_fn: makes a micro-batch of a list of samples.
        pin_memory: copy tensors into page-locked memory.
        drop_last: leave out an epoch's last micro-batch if it is smaller than the others.
        timeout: seconds to wait for a worker; 0 waits without limit.
        worker_init_fn: called in each worker with its number, after seeding. With an iterable
            dataset, ``get_worker_info().dataset`` is a wrapper whose ``dataset`` is the user's.
        multiprocessing_context: how workers are started.
        generator: its ``initial_seed()`` takes the place of the experiment's seed. It is not drawn
            from. Must be seeded alike on all ranks.
        prefetch_factor: micro-batches loaded ahead by each worker. Default: 2, or None without
            workers.
        persistent_workers: keep workers from one pass to the next.

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
        # torch's own loader checks the arguments and knows the defaults. It starts no worker and
        # draws nothing before it is iterated over, which never happens.
        plain: data.DataLoader[Any] = data.DataLoader(
            dataset,
            batch_size=batch_size,
            # torch refuses to shuffle nothing, in words that help nobody; the controller's do.
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
        self._epochs_begun = 0

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
        Nothing is padded or dropped, so without `repeat` some ranks may get one more than others:
        ``len()`` of the result is what this rank gets. With `repeat` it is the rank's part of one
        epoch, rounded for epochs that cannot be divided evenly.

        Args:
            repeat: go on from each epoch into the next, without end. Without it, each ``iter()``
                of the result gives the same pass.
            skip: micro-batches that this rank has consumed already, in all epochs.
            num_replicas: data-parallel ranks.
            rank: this rank among them.
            seed: the experiment's; the same on all ranks.
            epoch: the first epoch, from which `skip` counts.

        Raises:
            TrialError: a sampler that shards already, or a dataset without length where one is
                needed.
            ValueError: `skip` or `rank` out of range.
        """
        if self.generator is not None:
            seed = self.generator.initial_seed()
        if isinstance(self.dataset, data.IterableDataset):
            return self._iterable_loader(repeat, skip, num_replicas, rank, seed, epoch)
        chain = adapt_batch_sampler(self._order(), repeat, skip, num_replicas, rank, seed=seed)
        if self.num_workers:
            first = skip * num_replicas + rank
            chain = SeededBatches(chain, seed, first, num_replicas)
        chain.set_epoch(epoch)
        options = self._loading_options(seed, rank, skip)
        if self.batch_sampler is None:
            return data.DataLoader(self.dataset, batch_size=None, sampler=chain, **options)
        return data.DataLoader(self.dataset, batch_sampler=chain, **options)

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches in one pass over the whole dataset, all ranks together; None: unknown."""
        if isinstance(self.dataset, data.IterableDataset):
            return micro_batches_in(self.dataset, self.batch_size, self.drop_last)
        return length_of(self.sampler if self.batch_sampler is None else self.batch_sampler)

    def __len__(self) -> int:
        """Micro-batches in one pass over the whole dataset.

        Raises:
            TypeError: there is no telling.
        """
        length = self.num_micro_batches
        if length is None:
            raise TypeError("this DataLoader has no len(): its dataset or sampler has none")
        return length

    def __iter__(self) -> Iterator[Any]:
        """The whole dataset, once; the next epoch's order each time. For use outside of a run."""
        epoch = self._epochs_begun
        self._epochs_begun += 1
        return iter(self.get_data_loader(epoch=epoch))

    def _order(self) -> Any:
        """What gives the indices: of micro-batches, or with a batch_size of None of samples."""
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        innermost = getattr(order, "sampler", order)
        if type(innermost) is data.SequentialSampler and length_of(innermost) is None:
            raise TrialError(
                f"{type(self.dataset).__qualname__} has no len(), so there is no order to load its "
                "samples in; give it a __len__, give the DataLoader a sampler, or derive the "
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
            self.dataset,  # type: ignore[arg-type]  # checked by the caller
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            repeat=repeat,
            skip=skip,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            epoch=epoch,
        )
        # It makes lists of samples itself, so that no micro-batch reaches into the next epoch.
        return data.DataLoader(sharded, batch_size=None, **self._loading_options(seed, rank, skip))

    def _loading_options(self, seed: int, rank: int, skip: int) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "collate_fn": self.collate_fn,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
            "worker_init_fn": partial(begin_worker, self.worker_init_fn),
            "multiprocessing_context": self.multiprocessing_context,
            # Without one, every iter() would draw the workers' seed from the global generator.
            "generator": generator_for(seed, "workers", rank, skip),
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
        }
