"""`DistributedContext`: who this process is among all the ranks, and small-object collectives.

Follows `determined.core.DistributedContext`. The collectives carry any picklable object between
the ranks of one run, over a CPU process group of their own, so that they do not occupy the
accelerator, and with a deadline, so that a rank that never comes does not make the others wait for
ever: they raise, and say who was missing. They are for coordination, not for tensors in a step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from trial_core.errors import TrialError
from trial_core.exchange import Exchange

DEADLINE_VARIABLE = "TRIALFLOW_COLLECTIVE_SECONDS"
DEFAULT_DEADLINE_SECONDS = 1800.0

# What torchrun and trialflow's launcher set, and what DeepSpeed's launcher calls the same.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
_CROSS_RANK = ("GROUP_RANK", "CROSS_RANK")
_CROSS_SIZE = ("CROSS_SIZE",)

_LAUNCHED = ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

SINGLE_RANK_ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free one
}
"""What a process that no launcher has started must find in its environment, or DeepSpeed looks for
MPI."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has told this process which rank it is."""
    return any(name in environment for name in _LAUNCHED)


class DistributedContext:
    """Rank information and object collectives.

    A collective is called by every rank (its ``_local`` form by every rank of one machine), in the
    same order. It needs torch.distributed to be initialised, unless there is a single rank. The
    first one of all must be one that every rank calls, or `connect`: it sets up the groups.

    Args:
        rank: index of this process among all, 0 to `size` - 1.
        size: number of processes, all machines together.
        local_rank: index of this process on its machine.
        local_size: number of processes on this machine.
        cross_rank: index of this machine.
        cross_size: number of machines.
        chief_ip, pub_port, pull_port, port_offset, force_tcp: accepted as in the reference, and
            not used: the ranks have met through torch.distributed already.
        deadline_seconds: how long a collective waits for other ranks; by default
            ``TRIALFLOW_COLLECTIVE_SECONDS`` of the environment, or else half an hour.

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
        self.chief_ip = chief_ip
        self._deadline_seconds = _deadline(deadline_seconds)
        self._everyone: Exchange | None = None
        self._machine: Exchange | None = None

    # ------------------------------------------------------------------------- constructors

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> DistributedContext:
        """From the variables of whichever launcher; a single rank where there are none."""
        if "WORLD_SIZE" not in environment:
            environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return cls._read(environment, None, "from_environment", "torchrun")

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From the variables that torchrun sets.

        Args:
            chief_ip: accepted as in the reference; torch.distributed knows where to meet.

        Raises:
            TrialError: this process was not started by torchrun.
        """
        return cls._read(os.environ, chief_ip, "from_torch_distributed", "torchrun")

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From the variables that DeepSpeed's launcher sets.

        Args:
            chief_ip: accepted as in the reference; torch.distributed knows where to meet.

        Raises:
            TrialError: this process was not started by ``deepspeed``.
        """
        return cls._read(os.environ, chief_ip, "from_deepspeed", "deepspeed")

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> NoReturn:
        """Refused: kept so that a trial which is moved here is told what to do.

        Raises:
            TrialError: always.
        """
        raise TrialError(
            "from_horovod: Horovod is not supported, it has had no release since 2023; start the "
            "ranks with trialflow, torchrun or deepspeed instead, and call "
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
                    f"{caller}: {names[0]} is not set in the environment; it is set where "
                    f"`{launcher}` starts the script"
                )
            return default

        rank, size = number("RANK"), number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK", default=None if size > 1 else 0)
        local_size = number(*_LOCAL_SIZE, default=size)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            cross_rank=number(*_CROSS_RANK, default=rank // max(1, local_size)),
            cross_size=number(*_CROSS_SIZE, default=max(1, size // max(1, local_size))),
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
        """The ranks on this machine: every launcher numbers those of a machine in a row."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    def get_size(self) -> int:
        """Number of slots that the trial runs on."""
        return self.size

    def get_num_agents(self) -> int:
        """Number of machines that the trial runs on."""
        return self.cross_size

    # -------------------------------------------------------------------------- collectives

    def connect(self) -> None:
        """Create the process groups of the collectives. Collective: every rank calls this.

        The first collective does it by itself; a second call does nothing.

        Raises:
            TrialError: torch.distributed is not initialised, or has another number of ranks; or
                the ranks do not agree on which machine they are.
            DeadlineExceeded: a rank did not come.
        """
        if self.size == 1 or self._everyone is not None:
            return
        if not dist.is_initialized():
            raise TrialError(
                "a collective of context.distributed was called before torch.distributed was "
                "initialised; call deepspeed.init_distributed() first (with "
                "TRIALFLOW_MANUAL_INIT_DISTRIBUTED=1 that is the trial's own business)"
            )
        if dist.get_world_size() != self.size:
            raise TrialError(
                f"torch.distributed was initialised for {dist.get_world_size()} ranks, and the "
                f"environment says {self.size} (WORLD_SIZE)"
            )
        everyone = Exchange("all", range(self.size), self.rank, self._deadline_seconds)
        machine_of = everyone.allgather("connect", self.cross_rank)
        machines = {
            machine: [rank for rank in range(self.size) if machine_of[rank] == machine]
            for machine in sorted(set(machine_of))
        }
        self._check_machine(machines[self.cross_rank])
        if len(machines) == 1:
            self._machine = everyone
        else:
            # Every rank takes part in creating every group: torch.distributed asks for that.
            exchanges = {
                machine: Exchange(f"machine {machine}", ranks, self.rank, self._deadline_seconds)
                for machine, ranks in machines.items()
            }
            self._machine = exchanges[self.cross_rank]
        self._everyone = everyone

    def allgather(self, stuff: Any) -> list[Any]:
        """Everybody's `stuff`, in the order of ranks. Collective: every rank calls this.

        Raises:
            DeadlineExceeded: a rank did not come; as of every collective here.
        """
        exchange = self._exchange_of_all()
        return exchange.allgather("allgather", stuff) if exchange else [stuff]

    def allgather_local(self, stuff: Any) -> list[Any]:
        """The `stuff` of this machine's ranks. Collective: every rank of the machine calls this."""
        exchange = self._exchange_of_machine()
        return exchange.allgather("allgather_local", stuff) if exchange else [stuff]

    def gather(self, stuff: Any) -> list[Any] | None:
        """Everybody's `stuff` on rank 0, None elsewhere. Collective: every rank calls this."""
        exchange = self._exchange_of_all()
        return exchange.gather("gather", stuff) if exchange else [stuff]

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """The machine's `stuff` on its local rank 0, None elsewhere. Collective per machine."""
        exchange = self._exchange_of_machine()
        return exchange.gather("gather_local", stuff) if exchange else [stuff]

    def broadcast(self, stuff: Any) -> Any:
        """Rank 0's `stuff`, on every rank. Collective: every rank calls this."""
        exchange = self._exchange_of_all()
        return exchange.broadcast("broadcast", stuff) if exchange else stuff

    def broadcast_local(self, stuff: Any = None) -> Any:
        """The `stuff` of this machine's local rank 0. Collective: the machine's ranks call this."""
        exchange = self._exchange_of_machine()
        return exchange.broadcast("broadcast_local", stuff) if exchange else stuff

    # ---------------------------------------------------------------------------- internals

    def _exchange_of_all(self) -> Exchange | None:
        self.connect()
        return self._everyone

    def _exchange_of_machine(self) -> Exchange | None:
        if self.local_size == 1:
            return None
        self.connect()
        return self._machine

    def _check_machine(self, ranks: list[int]) -> None:
        if len(ranks) != self.local_size:
            raise TrialError(
                f"rank {self.rank} has local_size {self.local_size}, but the ranks that say they "
                f"are on machine {self.cross_rank} are {ranks}; LOCAL_WORLD_SIZE and GROUP_RANK "
                "must describe the same machines on every rank"
            )


def _check_within(name: str, value: int, of: str, count: int) -> None:
    if not 0 <= value < count:
        raise TrialError(f"{name} must be 0 or more and less than {of}, got {value} of {count}")


def _parsed(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TrialError(f"{name} in the environment must be a number, got {text!r}") from None


def _deadline(seconds: float | None) -> float:
    if seconds is None:
        text = os.environ.get(DEADLINE_VARIABLE, str(DEFAULT_DEADLINE_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
    else:
        text = str(seconds)
    if not (0 < seconds < math.inf):
        raise TrialError(
            f"the deadline of collectives ({DEADLINE_VARIABLE}) must be a positive number of "
            f"seconds, got {text!r}"
        )
    return seconds
