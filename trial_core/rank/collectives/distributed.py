"""`DistributedContext`: which rank this process is, and collectives of small objects.

Follows `determined.core.DistributedContext`. The collectives exchange picklable objects between
the ranks of one run. They use their own CPU process group, not the accelerator. They have a
deadline: if a rank does not come, the others raise and name it. Tensors arrive on the CPU, wherever
they were. Use the collectives for coordination, not for tensors in a training step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from trial_core.errors import TrialError, TrialValueError
from trial_core.rank.collectives.exchange import Exchange

COLLECTIVE_SECONDS = 1800.0
"""How long a collective waits for other ranks."""

DEADLINE_VARIABLE = "TRIALFLOW_COLLECTIVE_SECONDS"
CHIEF_VARIABLE = "DET_CHIEF_IP"

_LAUNCHED = ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

SINGLE_RANK_ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
}
"""The environment of a process that no launcher has started. Without it, DeepSpeed tries MPI."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has set this process's rank."""
    return any(name in environment for name in _LAUNCHED)


class DistributedContext:
    """Rank information and object collectives.

    Every rank calls a collective (its ``_local`` form: every rank of a machine), in the same order.
    With several ranks, torch.distributed must be initialised. The first collective creates the
    process groups, so it must not be a ``_local`` one, unless `connect` was called.

    Args:
        rank: index of this process, 0 to `size` - 1.
        size: number of processes on all machines.
        local_rank: index of this process on its machine.
        local_size: number of processes on this machine.
        cross_rank: index of this machine.
        cross_size: number of machines.
        chief_ip: the address of rank 0's machine; default: the environment variable
            ``DET_CHIEF_IP``. For information only: torch.distributed connects the ranks.
        pub_port, pull_port, port_offset, force_tcp: accepted as in Determined, but not used.
        deadline_seconds: how long a collective waits for other ranks. Default: the environment
            variable ``TRIALFLOW_COLLECTIVE_SECONDS``, else half an hour.

    Raises:
        TrialError: the numbers contradict each other.
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
        chief_ip: str | None = None,
        pub_port: int = 12360,
        pull_port: int = 12376,
        port_offset: int = 0,
        force_tcp: bool = False,
        deadline_seconds: float | None = None,
    ) -> None:
        _check_within("rank", rank, "size", size)
        _check_within("local_rank", local_rank, "local_size", local_size)
        _check_within("cross_rank", cross_rank, "cross_size", cross_size)
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self.chief_ip = chief_ip or os.environ.get(CHIEF_VARIABLE)
        self._deadline_seconds = _deadline(deadline_seconds)
        self._all_ranks: Exchange | None = None
        self._machine: Exchange | None = None

    # ------------------------------------------------------------------------- constructors

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> DistributedContext:
        """From any launcher's environment variables; a single rank if there are none."""
        if "WORLD_SIZE" not in environment:
            environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return cls._read(environment, None, "from_environment", "torchrun")

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From the environment variables of torchrun; for `chief_ip` see `DistributedContext`.

        Raises:
            TrialError: this process was not started by torchrun.
        """
        return cls._read(os.environ, chief_ip, "from_torch_distributed", "torchrun")

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From the environment variables of DeepSpeed's launcher; else as `from_torch_distributed`.

        Raises:
            TrialError: this process was not started by ``deepspeed``.
        """
        return cls._read(os.environ, chief_ip, "from_deepspeed", "deepspeed")

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> NoReturn:
        """Not supported: raises a TrialError that names the alternatives."""
        raise TrialError(
            "from_horovod: Horovod is not supported (its last release was in 2023); start the "
            "ranks with trialflow, torchrun or deepspeed, and call "
            "DistributedContext.from_torch_distributed() or .from_deepspeed()"
        )

    @classmethod
    def _read(
        cls, environment: Mapping[str, str], chief_ip: str | None, caller: str, launcher: str
    ) -> DistributedContext:
        def number(*names: str, default: int | None = None) -> int:
            for name in names:
                if name in environment:
                    return _parsed(name, environment[name])
            if default is None:
                raise TrialError(
                    f"{caller}: {names[0]} is not set in the environment; start the script with "
                    f"`{launcher}`, which sets it"
                )
            return default

        rank, size = number("RANK"), number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK", default=None if size > 1 else 0)
        # First the names of torchrun and trialflow, then DeepSpeed's launcher's.
        local_size = number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            cross_rank=number("GROUP_RANK", "CROSS_RANK", default=rank // max(1, local_size)),
            cross_size=number("CROSS_SIZE", default=max(1, size // max(1, local_size))),
            chief_ip=chief_ip,
        )

    # ------------------------------------------------------------------------------ getters

    def get_rank(self) -> int:
        """Index of this process among all ranks of the trial."""
        return self.rank

    def get_local_rank(self) -> int:
        """Index of this process on its machine."""
        return self.local_rank

    @property
    def local_ranks(self) -> range:
        """The ranks on this machine: every launcher gives them consecutive numbers."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    def get_size(self) -> int:
        """Number of slots of the trial."""
        return self.size

    def get_num_agents(self) -> int:
        """Number of machines of the trial."""
        return self.cross_size

    # -------------------------------------------------------------------------- collectives

    def connect(self) -> None:
        """Create the process groups of the collectives. Collective: every rank calls this.

        The first collective calls it; a second call does nothing.

        Raises:
            TrialError: torch.distributed is not initialised, or has a different number of ranks;
                or the ranks disagree about the machines.
            DeadlineExceeded: a rank did not call it in time.
        """
        if self.size == 1 or self._all_ranks is not None:
            return
        if not dist.is_initialized():
            raise TrialError(
                "a collective of context.distributed was called before torch.distributed was "
                "initialised; call deepspeed.init_distributed() first (with "
                "TRIALFLOW_MANUAL_INIT_DISTRIBUTED=1, the trial must do it)"
            )
        if dist.get_world_size() != self.size:
            raise TrialError(
                f"torch.distributed was initialised for {dist.get_world_size()} ranks, but "
                f"WORLD_SIZE is {self.size}; initialise it for as many ranks as were launched"
            )
        all_ranks = Exchange("all", range(self.size), self.rank, self._deadline_seconds)
        machine_of = all_ranks.allgather("connect", self.cross_rank)
        machine = [rank for rank in range(self.size) if machine_of[rank] == self.cross_rank]
        if len(machine) != self.local_size:
            raise TrialError(
                f"rank {self.rank} has local_size {self.local_size}, but the ranks of machine "
                f"{self.cross_rank} are {machine}; LOCAL_WORLD_SIZE and GROUP_RANK must be "
                "consistent on all ranks"
            )
        self._machine = all_ranks
        if len(machine) < self.size:
            name = f"machine {self.cross_rank}"
            self._machine = Exchange(name, machine, self.rank, self._deadline_seconds)
        self._all_ranks = all_ranks

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the `stuff` of all ranks, in their order. Collective: every rank calls this.

        Raises:
            DeadlineExceeded: a rank did not call it in time. Every collective raises this.
        """
        exchange = self._exchange_of_all()
        return exchange.allgather("allgather", stuff) if exchange else [stuff]

    def allgather_local(self, stuff: Any) -> list[Any]:
        """The `stuff` of this machine's ranks. Collective: every rank of the machine calls this."""
        exchange = self._exchange_of_machine()
        return exchange.allgather("allgather_local", stuff) if exchange else [stuff]

    def gather(self, stuff: Any) -> list[Any] | None:
        """On rank 0 return the `stuff` of all ranks, else None. Collective: every rank calls it."""
        exchange = self._exchange_of_all()
        return exchange.gather("gather", stuff) if exchange else [stuff]

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """The machine's `stuff` on its local rank 0, else None. Collective: its ranks call this."""
        exchange = self._exchange_of_machine()
        return exchange.gather("gather_local", stuff) if exchange else [stuff]

    def broadcast(self, stuff: Any) -> Any:
        """Return rank 0's `stuff`, on every rank. Collective: every rank calls this."""
        exchange = self._exchange_of_all()
        return exchange.broadcast("broadcast", stuff) if exchange else stuff

    def broadcast_local(self, stuff: Any = None) -> Any:
        """The `stuff` of the machine's local rank 0. Collective: its ranks call this."""
        exchange = self._exchange_of_machine()
        return exchange.broadcast("broadcast_local", stuff) if exchange else stuff

    # ---------------------------------------------------------------------------- internals

    def _exchange_of_all(self) -> Exchange | None:
        self.connect()
        return self._all_ranks

    def _exchange_of_machine(self) -> Exchange | None:
        if self.local_size == 1:
            return None
        self.connect()
        return self._machine


def _check_within(name: str, value: int, of: str, count: int) -> None:
    if not 0 <= value < count:
        raise TrialValueError(
            f"{name} must be at least 0 and less than {of}, got {value} of {count}"
        )


def _parsed(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TrialValueError(f"{name} in the environment must be a number, got {text!r}") from None


def _deadline(seconds: float | None) -> float:
    if seconds is None:
        text = os.environ.get(DEADLINE_VARIABLE, str(COLLECTIVE_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
    else:
        text = str(seconds)
    if not (0 < seconds < math.inf):
        raise TrialValueError(
            f"the deadline of collectives ({DEADLINE_VARIABLE}) must be a positive number of "
            f"seconds, got {text!r}"
        )
    return seconds
