"""Ending a workload early on all ranks after the same step, without a collective.

A stop that is asked for while ranks train finds them a step or so apart, and one that ends sooner
than another leaves it in a collective for ever. So all ranks are first held, and say how far they
are; then all proceed to where the foremost is. While nobody asks, a step costs two attributes::

    driver                   rank 0 (in step 7)         rank 1 (in step 8, waiting for rank 0)
      Hold ────────────────► 7 begun                    8 begun
      ◄───────────── Held 7 ─┴───────────────── Held 8 ─┘
      Proceed 8 ───────────► goes on to step 8          ends after step 8

`Brake` is a rank's part, `Braking` that of whoever speaks to all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

TO_THE_END = 2**31
"""More steps than any workload has: what a rank has begun that can no longer end early."""


class Position(NamedTuple):
    """How far a rank is. The later is the greater.

    Attributes:
        workload: how many workloads it has begun that have steps; the same ones on every rank.
        steps: how many steps of the last one.
    """

    workload: int
    steps: int


class Brake:
    """Asked before every step of a workload that may end early.

    `hold`, `proceed` and `release` are for any thread, the rest for the one that carries out
    workloads.
    """

    def __init__(self) -> None:
        self._at = Position(0, 0)
        self._is_held = False
        self._end: Position | None = None
        self._changed = threading.Condition()

    def begin_workload(self) -> None:
        """The next workload that has steps begins."""
        self._at = Position(self._at.workload + 1, 0)

    def lets_begin(self) -> bool:
        """Whether one more step may begin; if not, the workload ends here, as on every rank.

        Waits while the ranks agree.
        """
        return self._lets_reach(self._at.steps + 1)

    def lets_end(self) -> bool:
        """Whether the workload may go on to its end, from where it cannot be broken off."""
        return self._lets_reach(TO_THE_END)

    def hold(self) -> Position:
        """Let no step begin until told to proceed; how far this rank is."""
        self._end = None
        self._is_held = True
        return self._at

    def hold_here(self) -> None:
        """Let no step begin, because this rank would stop: whoever brakes is to hear of it, and
        has all ranks hold. Of no effect where they do already."""
        self._is_held = True  # no more: what was agreed on stays, if it was

    def proceed(self, end: Position) -> None:
        """All ranks hold: go on to `end`, and end there, as does all that follows."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def release(self) -> None:
        """Forget that anybody asked."""
        with self._changed:
            self._is_held, self._end = False, None

    def _lets_reach(self, steps: int) -> bool:
        before = self._at
        self._at = wanted = Position(before.workload, steps)
        # In this order, and the other way round in `hold`: one of the two sees the other.
        if not self._is_held:
            return True
        self._at = before  # what waits has not begun
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)
            if self._end is None or wanted > self._end:
                return False
            self._at = wanted
            return True


class Braking:
    """Has all ranks end where the foremost is.

    Args:
        hold: tells every rank to hold, and to say how far it is.
        proceed: tells every rank where to end.
    """

    def __init__(
        self, world_size: int, hold: Callable[[], None], proceed: Callable[[Position], None]
    ) -> None:
        self._world_size = world_size
        self._hold = hold
        self._proceed = proceed
        self._held: dict[int, Position] = {}

    def start(self) -> None:
        """Have all ranks hold."""
        self._held = {}
        self._hold()

    def rank_held(self, rank: int, at: Position) -> None:
        """A rank holds, and is there. Called in one thread."""
        self._held[rank] = at
        if len(self._held) == self._world_size:
            self._proceed(max(self._held.values()))
