"""Starts the driver of a script's ranks, in a process next to rank 0, and has the ranks join it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

import msgspec

from trial_core.driver.script_order import Order
from trial_core.errors import SlotsError
from trial_core.messages import Abort, Invitation, Logged, decode_invitation
from trial_core.processes.machine.child import Child
from trial_core.rank.collective_errors import run_on_rank_0
from trial_core.rank.collectives.distributed import DistributedContext

logger = logging.getLogger(__name__)
driver_logger = logging.getLogger("trial_core.driver")

END_SECONDS = 60.0
"""How long the driver may take to write its last report, after its ranks have left."""


_EARLY: list[DriverProcess] = []
_STARTED: WeakSet[DriverProcess] = WeakSet()


@contextmanager
def early_driver(distributed: DistributedContext) -> Iterator[None]:
    """Start the driver now, for `take_driver` within the block."""
    driver = DriverProcess(distributed)
    _EARLY.append(driver)
    try:
        yield
    finally:
        if driver in _EARLY:
            _EARLY.remove(driver)
            driver.close()


@contextmanager
def take_driver(distributed: DistributedContext) -> Iterator[DriverProcess]:
    """The driver that was started early, or a new one; it ends after the block."""
    driver = _EARLY.pop() if _EARLY else DriverProcess(distributed)
    try:
        yield driver
    finally:
        driver.close()


class DriverProcess:
    """The driver of a script, on rank 0; on other ranks, nothing.

    `init` starts it early: it imports its modules while the script constructs its trial.
    """

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed
        self._child: Child | None = None
        self._has_invited = False
        self._last_words = b""
        if distributed.get_rank() == 0:
            self._child = Child(["-m", "trial_core.driver.script_driver_main"], answers=True)
            _STARTED.add(self)

    def give(self, order: Callable[[], Order]) -> Invitation:
        """Have the driver drive the ranks. Collective. Its TrialflowError is raised on every
        rank."""
        return run_on_rank_0(self._distributed, lambda: self._give(order()))

    def end(self) -> None:
        """Wait until the driver has ended, after the ranks have left. Collective."""
        run_on_rank_0(self._distributed, self._end)

    def close(self) -> None:
        """Wait until the driver has ended, once the ranks have left. Not collective."""
        child = self._child
        if child is None or child.output.closed:
            return
        if not self._has_invited:
            child.kill()
        elif child.wait(END_SECONDS):
            child.reap()
        else:
            logger.warning("the driver has not written its last report within %g s", END_SECONDS)
            child.kill()
        if self._has_invited and child.exit_code is not None and child.exit_code < 0:
            by = signal.Signals(-child.exit_code).name
            logger.error("the driver of this script was ended by %s", by)
        os.set_blocking(child.output.fileno(), False)  # a process of the driver's may hold it
        self._last_words = child.output.read() or b""
        child.output.close()
        child.close_input()

    def forget(self) -> None:
        """Let go, in a forked process, of the pipe whose end says that rank 0 is gone."""
        pipe = self._child.input if self._child is not None else None
        if pipe is not None and not pipe.closed:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, pipe.fileno(), inheritable=False)  # stays valid, to be closed later
            os.close(nothing)

    def _give(self, order: Order) -> Invitation:
        child = self._child
        if child is None:
            raise SlotsError("the driver runs beside rank 0")
        is_told = child.tell(msgspec.json.encode(order) + b"\n")
        line = child.output.readline() if is_told else b""
        if not line:
            child.reap()
            raise SlotsError(
                f"the driver of this script has ended with exit code {child.exit_code} before its "
                "ranks could join; see its error above"
            )
        try:
            reply = decode_invitation(bytes.fromhex(line.decode()))
        except ValueError as error:
            raise SlotsError(f"the driver of this script said {line!r}, no invitation") from error
        self._has_invited = True
        if isinstance(reply, Abort):
            raise reply.error
        if isinstance(reply, Logged):
            raise SlotsError(f"the driver of this script said {reply.text!r}, no invitation")
        return reply

    def _end(self) -> None:
        self.close()
        if self._child is None:
            return
        why = f"exit code {self._child.exit_code}"
        for line in self._last_words.splitlines():
            with suppress(ValueError):
                said = decode_invitation(bytes.fromhex(line.decode()))
                if isinstance(said, Logged):
                    driver_logger.log(said.level, "%s", said.text)
                elif isinstance(said, Abort):
                    why = str(said.error)
        if (self._child.exit_code or 0) > 0:
            logger.error("the driver of this script has failed after its ranks were done: %s", why)


def _forget_in_child() -> None:
    """A driver ends when rank 0 is gone: a forked process must not hold its pipe."""
    for driver in list(_STARTED):
        driver.forget()


os.register_at_fork(after_in_child=_forget_in_child)
