"""The state of a slot group: if it takes requests, and when its ranks pause. Without processes."""

from __future__ import annotations

import os
from enum import Enum

from trial_core.errors import SlotsError
from trial_core.messages import AnyRequest, AttachTrial, BuildTrial, SaveCheckpoint, TrainBatches


class Pause(Enum):
    """Why all ranks pause, to agree on a batch."""

    STOP = "the workload ends there, and later ones do not begin"
    BREAK = "the train-workload ends there, and later ones begin as usual"


class GroupState:
    """The state of a slot group: events in, instructions out. The group calls it under its lock.

    Its first failure ends the ranks. Once `is_closing`, an exit is not a failure.
    """

    def __init__(self) -> None:
        self.failure: SlotsError | None = None
        self.is_closing = False
        self._is_stopping = False
        self._breaks_next = False
        self._has_aborted = False

    @property
    def refusal(self) -> SlotsError | None:
        """The error of a request that is submitted now, or None."""
        if self.failure is None and self.is_closing:
            return SlotsError(f"the slot group was closed (by process {os.getpid()})")
        return self.failure

    def submitted(self, request: AnyRequest) -> Pause | None:
        """A request goes to the ranks, unless there is a `refusal`. Return the pause that follows.

        Another trial begins without a stop. A checkpoint stands for a break that is due.
        """
        if isinstance(request, (BuildTrial, AttachTrial)):
            self._is_stopping = self._breaks_next = False
        if self.refusal is not None:
            return None
        if isinstance(request, SaveCheckpoint):
            self._breaks_next = False
        elif isinstance(request, TrainBatches) and self._breaks_next and not self._is_stopping:
            self._breaks_next = False
            return Pause.BREAK
        return None

    def stop(self) -> Pause | None:
        """The workload is to end, and later ones are not to begin until another trial is built."""
        if self._is_stopping:
            return None
        self._is_stopping = True
        return Pause.STOP

    def break_training(self, *, is_training: bool) -> Pause | None:
        """The train-workload is to end; or the next one, unless a checkpoint is saved before."""
        if not is_training:
            self._breaks_next = True
            return None
        return None if self._is_stopping else Pause.BREAK

    def fail(self, failure: SlotsError) -> bool:
        """Note a failure. Return True if it ends the group: the first one, before it closes."""
        if self.is_closing or self.failure is not None:
            return False
        self.failure = failure
        return True

    def abort(self) -> bool:
        """Ranks of another program are told of an error. Return True for the first time."""
        is_first, self._has_aborted = not self._has_aborted, True
        return is_first

    def can_shut_down(self, *, is_busy: bool) -> bool:
        """Return whether the ranks can be asked to end; if not, they are killed."""
        return not (self.is_closing or self._has_aborted or is_busy or self.failure is not None)
