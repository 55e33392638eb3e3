"""Ending a workload early on all ranks after the same step, without a collective.

A stop that is asked for while ranks train finds them a step or so apart, and one that ends sooner
than another leaves it in a collective for ever. So the driver first has every rank hold, and say
how many steps it has begun; then all proceed to the most that any has. While nobody asks, a step
costs two attributes::

    driver                   rank 0 (in step 7)         rank 1 (in step 8, waiting for rank 0)
      Hold ────────────────► 7 begun                    8 begun
      ◄───────────── Held 7 ─┴───────────────── Held 8 ─┘
      Proceed 8 ───────────► goes on to step 8          ends after step 8

`Brake` is a rank's part, `Braking` the driver's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trial_core.messages import FromDriver, Held, Hold, Proceed

TO_THE_END = 2**31
"""More steps than any workload has: what a rank has begun that can no longer end early."""


class Brake:
    """Asked before every step of a workload that may end early.

    `arrived`, `hold` and `proceed` are for the thread that hears the driver, the rest for the one
    that carries out workloads.
    """

    def __init__(self) -> None:
        self._number = 0
        self._begun = 0
        self._is_held = False
        self._last: int | None = None
        self._changed = threading.Condition()

    # ------------------------------------------------------------------- for the workload

    def lets_begin(self) -> bool:
        """Whether one more step may begin; if not, the workload ends here, as on every rank.

        Waits while the ranks agree.
        """
        return self._lets_reach(self._begun + 1)

    def lets_end(self) -> bool:
        """Whether the workload may go on to its end, from where it cannot be broken off."""
        return self._lets_reach(TO_THE_END)

    def _lets_reach(self, steps: int) -> bool:
        before, self._begun = self._begun, steps
        # In this order, and the other way round in `hold`: one of the two sees the other.
        if not self._is_held:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._last is not None)
            if self._last is not None and steps <= self._last:
                return True
            self._begun = before
            return False

    # -------------------------------------------------------------- for who hears the driver

    def arrived(self, number: int, ends_at_once: bool = False) -> None:
        """The next workload has come, and none before it is under way any more.

        Args:
            ends_at_once: whether not a single step of it may begin; every rank is told the same.
        """
        with self._changed:
            self._number, self._begun = number, 0
            self._is_held, self._last = ends_at_once, 0 if ends_at_once else None

    def hold(self, number: int) -> int | None:
        """Let no step begin until told to proceed; how many have begun. None: it is over."""
        if number != self._number:
            return None
        self._is_held = True
        return self._begun

    def proceed(self, number: int, steps: int) -> None:
        """All ranks hold: end after so many steps."""
        with self._changed:
            if number == self._number:
                self._last = steps
                self._changed.notify_all()


class NoBrake(Brake):
    """Where nobody asks a workload to end early."""

    def _lets_reach(self, steps: int) -> bool:
        return True


class Braking:
    """Has all ranks hold, then proceed to the same step. For any thread.

    Args:
        send: tells every rank.
    """

    def __init__(self, world_size: int, send: Callable[[FromDriver], None]) -> None:
        self._world_size = world_size
        self._send = send
        self._begun: dict[int, int] = {}
        self._number = 0

    def hold(self, number: int) -> None:
        """Have the workload with that number end early."""
        self._number, self._begun = number, {}
        self._send(Hold(number=number))

    def rank_held(self, rank: int, held: Held) -> None:
        """A rank has said how far it is. Called in one thread."""
        if held.number != self._number:
            return
        self._begun[rank] = held.steps
        if len(self._begun) == self._world_size:
            self._send(Proceed(number=held.number, steps=max(self._begun.values())))
