"""A slot's process: forked by `fork_and_reap_ranks`, or started as a module with ``python -m``.

The main thread is the compute lane: one workload at a time, collectives allowed. A background
thread is the I/O lane: no collectives. A rank that loses its driver ends. The fork server kills its
children, and kills the rank if it does not notice.

The route of a stop: see `trial_core/schedule/stop_requests.py`.

Standard input: the channel's secret. Environment: torchrun's RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT; TRIALFLOW_CHANNEL; TRIALFLOW_LOG, the path of this rank's log, if it has
one; on rank 0 TRIALFLOW_STORE_SOCKET (see `rank/collectives/rendezvous.py`); where runs share
devices TRIALFLOW_DEVICE_LOCKS (see `device_locks`); TRIALFLOW_KEEPER (see `kept_memory`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from setproctitle import setproctitle

from trial_core.common.dependency_bounds import out_of_bounds
from trial_core.errors import SlotsError, TrialError
from trial_core.messages import (
    AnyRequest,
    AnyResult,
    BuildTrial,
    EndFit,
    Hello,
    Shutdown,
    StopRequested,
)
from trial_core.processes.slots.announcer import Announcer
from trial_core.processes.slots.connection import RankConnection
from trial_core.processes.slots.device_locks import keep_locks
from trial_core.processes.slots.kept_memory import connect_keeper
from trial_core.processes.slots.log_pump import LogPump
from trial_core.processes.slots.rank_server import RankServer, Workloads
from trial_core.processes.slots.stacks import register_stack_dump
from trial_core.schedule.command import is_command

if TYPE_CHECKING:
    from trial_core.rank.controller import Controller
    from trial_core.rank.core_api.script_controller import ScriptController

logger = logging.getLogger(__name__)

TRIAL_MODULES = (
    "trial_core.rank.controller",
    "trial_core.trainer.entrypoint",
    "trial_core.rank.first_use",
)
"""The imports of a trial's ranks, with PyTorch and DeepSpeed; a fork server can do them."""
SCRIPT_MODULES = ("trial_core.rank.core_api.script_controller",)
"""The imports of a Core API script's ranks."""


class Rank(Workloads):
    """One rank: its connection, its two lanes and its controller."""

    def __init__(self, connection: RankConnection, rank: int, log: str | None = None) -> None:
        self._server = RankServer(connection, lambda error: end_rank(str(error)))
        self.send = self._server.send
        self._announcer = Announcer(self.send, is_silent=rank != 0)
        self._controller: Controller | ScriptController | None = None
        self._runs_script = False
        self._pump = LogPump(Path(log), rank, self.send) if log else None

    def run(self) -> NoReturn:
        """Serve requests until `Shutdown`. Called on the main thread."""
        self._server.start(self)
        while True:
            self._serve_compute()

    def serve_fit(self, controller: Controller) -> None:
        """Serve requests with a script's trial until `EndFit`. Called on the main thread.

        The request that runs the script is still being carried out.
        """
        outer, self._controller = self._controller, controller
        try:
            while not isinstance(self._serve_compute(), EndFit):
                pass
        finally:
            self._controller = outer

    def _serve_compute(self) -> AnyRequest | None:
        envelope = self._server.next_request()
        if envelope is None:
            return None
        self._server.answer(envelope)
        if isinstance(envelope.request, Shutdown):
            if self._pump is not None:
                self._pump.close()
            sys.stdout.flush()
            sys.stderr.flush()
            # Not `sys.exit`: threads and atexit hooks of libraries may hang. The controller is
            # closed.
            os._exit(0)
        return envelope.request

    @property
    def batches_trained(self) -> int | None:
        return None if self._controller is None else self._controller.batches_trained

    def carry_out(self, request: AnyRequest) -> AnyResult:
        return self._controller_for(request).carry_out(request)

    def close(self) -> None:
        if self._controller is not None:
            self._controller.close()

    def _controller_for(self, request: AnyRequest) -> Controller | ScriptController:
        if isinstance(request, BuildTrial):
            runs_script = is_command(str(request.experiment["entrypoint"]))
            if self._controller is not None and runs_script != self._runs_script:
                self._controller.close()
                self._controller = None
            self._runs_script = runs_script
        if self._controller is None:
            self._controller = self._script_controller() if self._runs_script else self._trials()
        return self._controller

    # Late imports: in a rank without a fork server they take seconds, and it must join first.

    def _trials(self) -> Controller:
        with self._announcer.activity("importing PyTorch and DeepSpeed"):
            from trial_core.rank.controller import Controller

            try:
                from trial_core.trainer.entrypoint import build_adapter
            except ImportError as error:
                if (problem := out_of_bounds("deepspeed")) is None:
                    raise
                raise TrialError(f"{problem}: install that ({error})") from error

        return Controller(
            partial(build_adapter, announcer=self._announcer),
            emit=self.send,
            stop_barrier=self._server.stop_barrier,
            on_stop_requested=lambda: self.send(StopRequested()),
        )

    def _script_controller(self) -> ScriptController:
        with self._announcer.activity("importing PyTorch"):
            from trial_core.rank.core_api.script_controller import ScriptController, run_in_slot

        barrier, receipts = self._server.stop_barrier, self._server.receipts
        return ScriptController(self.send, barrier, receipts, run_in_slot, self.serve_fit)


def end_rank(reason: str) -> None:
    """End this rank at once. Its children are killed by the fork server."""
    logger.error("this rank ends: %s", reason)
    os._exit(1)


def read_secret() -> bytes:
    """The channel's secret, from standard input. No child inherits the pipe."""
    secret = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return secret


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGINT in this rank, but not in its forked children.

    A machine that shuts down signals all processes. The driver also gets the signal: it has the
    ranks save, and then shuts them down.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        """A handler, as programs that this rank starts would inherit SIG_IGN."""

    before = {each: signal.signal(each, ignore) for each in (signal.SIGTERM, signal.SIGINT)}

    def in_child() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    os.register_at_fork(after_in_child=in_child)


def show_title(title: str) -> None:
    """Set the name by which ``ps``, ``top`` and ``nvidia-smi`` show this process."""
    # This leaves the memory of the environment alone, which ``ps e`` shows.
    os.environ["SPT_NOENV"] = "1"
    setproctitle(title)
    del os.environ["SPT_NOENV"]


def main() -> None:
    rank = int(os.environ["RANK"])
    show_title(f"trialflow: rank {rank} of {os.environ['WORLD_SIZE']}")
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    register_stack_dump()
    ignore_stop_signals()
    keep_locks()
    connect_keeper()
    hello = Hello(rank=rank, pid=os.getpid(), host=socket.gethostname())
    try:
        connection = RankConnection(os.environ["TRIALFLOW_CHANNEL"], read_secret(), hello)
    except SlotsError as error:
        sys.exit(f"rank {rank} cannot join its driver: {error}")
    Rank(connection, rank, os.environ.get("TRIALFLOW_LOG")).run()


if __name__ == "__main__":
    main()
