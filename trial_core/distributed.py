"""`DistributedContext`: who this process is among all the ranks, and small-object collectives.

Follows `determined.core.DistributedContext`. The collectives carry any picklable object between
the ranks of one run, over a CPU process group of their own with a deadline, so that they neither
occupy the accelerator nor wait for ever. They are for coordination, not for tensors in a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trial_core.errors import TrialError

COLLECTIVE_DEADLINE = timedelta(minutes=30)


class DistributedContext:
    """Rank information and object collectives.

    Args:
        rank: index of this process among all, 0 to `size` - 1.
        size: number of processes, all machines together.
        local_rank: index of this process on its machine.
        local_size: number of processes on this machine.
        cross_rank: index of this machine.
        cross_size: number of machines.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        cross_rank: int,
        cross_size: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self._group: Any = None
        self._local_group: Any = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> DistributedContext:
        """From the variables that torchrun and trialflow's launcher set."""
        size = int(environment.get("WORLD_SIZE", "1"))
        rank = int(environment.get("RANK", "0"))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", str(size)))
        return cls(
            rank=rank,
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", str(rank % local_size))),
            local_size=local_size,
            cross_rank=int(environment.get("GROUP_RANK", str(rank // local_size))),
            cross_size=max(1, size // local_size),
        )

    def connect(self) -> None:
        """Create the process groups of the object collectives. Collective: every rank calls this.

        Needs an initialised torch.distributed, unless there is a single rank.
        """
        if self.size == 1 or self._group is not None:
            return
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_DEADLINE)
        for machine in range(self.cross_size):
            first = machine * self.local_size
            ranks = list(range(first, first + self.local_size))
            group = dist.new_group(ranks, backend="gloo", timeout=COLLECTIVE_DEADLINE)
            if machine == self.cross_rank:
                self._local_group = group

    def get_rank(self) -> int:
        """Index of this process among all ranks of the trial."""
        return self.rank

    def get_local_rank(self) -> int:
        """Index of this process on its machine."""
        return self.local_rank

    def get_size(self) -> int:
        """Number of slots that the trial runs on."""
        return self.size

    def get_num_agents(self) -> int:
        """Number of machines that the trial runs on."""
        return self.cross_size

    def allgather(self, stuff: Any) -> list[Any]:
        """Everybody's `stuff`, in the order of ranks. Collective: every rank calls this."""
        return _allgather(stuff, self.size, self._group)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """The `stuff` of this machine's ranks. Collective: every rank of the machine calls this."""
        return _allgather(stuff, self.local_size, self._local_group)

    def gather(self, stuff: Any) -> list[Any] | None:
        """Everybody's `stuff` on rank 0, None elsewhere. Collective: every rank calls this."""
        return _gather(stuff, 0, self.rank, self.size, self._group)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """The machine's `stuff` on its local rank 0, None elsewhere. Collective per machine."""
        chief = self.cross_rank * self.local_size
        return _gather(stuff, chief, self.rank, self.local_size, self._local_group)

    def broadcast(self, stuff: Any) -> Any:
        """Rank 0's `stuff`, on every rank. Collective: every rank calls this."""
        return _broadcast(stuff, 0, self.size, self._group)

    def broadcast_local(self, stuff: Any = None) -> Any:
        """The `stuff` of this machine's local rank 0. Collective: the machine's ranks call this."""
        chief = self.cross_rank * self.local_size
        return _broadcast(stuff, chief, self.local_size, self._local_group)


def _connected(group: Any) -> Any:
    if group is None:
        raise TrialError(
            "a collective of context.distributed was called before torch.distributed was "
            "initialised; with DET_MANUAL_INIT_DISTRIBUTED=1, initialise it in the trial's "
            "__init__ before using context.distributed"
        )
    return group


def _allgather(stuff: Any, size: int, group: Any) -> list[Any]:
    if size == 1:
        return [stuff]
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, stuff, group=_connected(group))
    return everybody


def _gather(stuff: Any, chief: int, rank: int, size: int, group: Any) -> list[Any] | None:
    if size == 1:
        return [stuff]
    everybody: list[Any] | None = [None] * size if rank == chief else None
    dist.gather_object(stuff, everybody, dst=chief, group=_connected(group))
    return everybody


def _broadcast(stuff: Any, chief: int, size: int, group: Any) -> Any:
    if size == 1:
        return stuff
    box = [stuff]
    dist.broadcast_object_list(box, src=chief, group=_connected(group))
    return box[0]
