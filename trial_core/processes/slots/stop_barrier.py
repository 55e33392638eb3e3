"""Ends a workload early after the same step on all ranks, without a collective.

When a stop is requested, ranks may be a step apart. If they ended after different steps, one would
wait in a collective for ever. So every rank first pauses and reports its position; then all ranks
continue to the greatest position. Without a stop request, a step costs two attribute accesses::

    driver                   rank 0 (in step 7)         rank 1 (in step 8, waiting for rank 0)
      PauseSteps ──────────► 7 begun                    8 begun
      ◄────── StepsPaused 7 ─┴────────── StepsPaused 8 ─┘
      ResumeUntil 8 ───────► begins step 8              ends after step 8

A *break* ends only a train-workload, in the same way: the next workload begins as usual. It ends at
least one step after its begin, so that each break finds something new to save.

`StopBarrier` is a rank's part, and `StopCoordinator` the driver's.

The route of a stop: see `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

LAST_STEP = 2**31
"""The position of a workload that can no longer end early: more steps than any workload has."""


class Position(NamedTuple):
    """How far a rank is. Positions compare in order of time.

    Attributes:
        workload: the number of workloads with steps that the rank has begun.
        steps: how many steps of the last one it has begun.
    """

    workload: int
    steps: int


class StopBarrier:
    """Asked before every step of a workload that may end early.

    `expect_workload`, `pause`, `resume_until` and `reset` may be called from any thread, the other
    methods only from the thread that runs workloads.
    """

    def __init__(self) -> None:
        self._at = self._expected = Position(0, 0)
        self._has_breaks = False
        self._is_paused = False
        self._end: Position | None = None
        self._is_break = False
        self._changed = threading.Condition()

    def expect_workload(self) -> None:
        """Note that a workload with steps is about to begin. Called while no workload runs.

        A break is then for it, even if this rank pauses before."""
        self._expected = Position(self._at.workload + 1, 0)

    def begin_workload(self, has_breaks: bool = False) -> None:
        """Begin the next workload with steps, which a break ends if it `has_breaks`."""
        self._has_breaks = has_breaks
        self._at = Position(self._at.workload + 1, 0)

    def may_begin_step(self) -> bool:
        """True if one more step may begin; if not, the workload ends here on every rank.

        Waits while the ranks agree on the last step.
        """
        return self._may_reach(self._at.steps + 1)

    def may_finish_workload(self) -> bool:
        """True if the workload may run to its end; from then on it cannot end early."""
        return self._may_reach(LAST_STEP)

    def pause(self) -> Position:
        """Let no step begin until `resume_until`. Return this rank's position."""
        with self._changed:
            self._end = None
            self._is_paused = True
            return max(self._at, self._expected)

    def pause_self(self) -> None:
        """Let no step begin because this rank requests a stop. The coordinator then pauses all.

        No effect if the ranks have already agreed on the last step.
        """
        self._is_paused = True  # `_end` stays: it may have been agreed on already

    def resume_until(self, end: Position, is_break: bool = False) -> None:
        """Continue to `end`: all ranks are paused.

        At a break, later workloads begin, and only one with breaks ends at `end`; after a stop,
        nothing begins.
        """
        with self._changed:
            self._end, self._is_break = end, is_break
            self._changed.notify_all()

    def reset(self) -> None:
        with self._changed:
            self._is_paused, self._end = False, None

    def _may_reach(self, steps: int) -> bool:
        before = self._at
        self._at = wanted = Position(before.workload, steps)
        # `pause` writes `_is_paused` and then reads `_at`. This order is the reverse, so at least
        # one of the two threads sees what the other has written.
        if not self._is_paused:
            return True
        self._at = before  # a step that waits has not begun
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)
            if self._end is None:
                return False
            if wanted > self._end:
                is_over = wanted.workload > self._end.workload or not self._has_breaks
                if not self._is_break or not is_over:
                    return False
                self._is_paused, self._end = False, None
            self._at = wanted
            return True


class StopCoordinator:
    """Has all ranks end at the greatest position of any rank. One agreement at a time."""

    def __init__(
        self,
        world_size: int,
        pause: Callable[[], None],
        resume_until: Callable[[Position, bool], None],
    ) -> None:
        self._world_size = world_size
        self._pause = pause
        self._resume_until = resume_until
        self._positions: dict[int, Position] = {}
        self._lock = threading.Lock()
        self._is_agreeing = self._is_break = self._stop_follows = False

    def start(self, is_break: bool = False) -> None:
        """Have all ranks pause; during an agreement on a break, a stop waits for its end."""
        with self._lock:
            if not self._is_agreeing:
                self._begin(is_break)
            elif not is_break:
                self._stop_follows = True

    def rank_paused(self, rank: int, at: Position) -> None:
        """Note that a rank has paused at `at`; always called in the same thread."""
        with self._lock:
            self._positions[rank] = at
            if len(self._positions) < self._world_size:
                return
            end = max(self._positions.values())
            if self._is_break:
                end = end._replace(steps=max(end.steps, 1))
            self._resume_until(end, self._is_break)
            self._is_agreeing = False
            if self._stop_follows:
                self._stop_follows = False
                self._begin(is_break=False)

    def _begin(self, is_break: bool) -> None:
        self._positions, self._is_agreeing, self._is_break = {}, True, is_break
        self._pause()
