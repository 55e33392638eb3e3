"""Decides whether failed ranks are launched again, when, and whether with fewer of them."""

from __future__ import annotations

from trial_core.errors import RankFailed, SlotsError, Stalled, TopologyMismatch
from trialflow.tasks.trial_run import TrialRun

MAX_PAUSE_SECONDS = 60
SAME_REFUSALS = 3
"""A number of ranks that does not fit is usually part of the text."""


class Restarts:
    """The restarts of one flow run.

    Attributes:
        count: how many were granted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._last_cause: tuple[object, ...] | None = None

    def grant(self, failure: RankFailed | Stalled, run: TrialRun) -> bool:
        """Decide whether to launch the ranks again after `failure`. Counts a granted restart."""
        cause = _cause(failure, run)
        if self.count == self.limit or cause == self._last_cause:
            return False
        if not _can_help(failure, run):
            return False
        self.count, self._last_cause = self.count + 1, cause
        return True

    @property
    def pause_seconds(self) -> int:
        """How long to wait before the last granted restart. The first restart has no pause."""
        return 0 if self.count <= 1 else min(2 ** (self.count - 1), MAX_PAUSE_SECONDS)


class Refusals:
    """The numbers of ranks that the trial of one flow run refuses, with a range of slots.

    The global batch may not be divisible by such a number, or the ranks by the pipeline stages.
    """

    def __init__(self) -> None:
        self._last = ""
        self._repeated = 0

    def grant(self, failure: SlotsError | TopologyMismatch, run: TrialRun) -> bool:
        """Whether `failure` may be a refusal, so that fewer ranks may be tried.

        The largest number has to be right. The same text for `SAME_REFUSALS` numbers is a mistake.
        """
        is_refusal = isinstance(failure, TopologyMismatch) or (
            isinstance(failure, RankFailed)
            and failure.error_type is not None
            and failure.during == "build-trial"
        )
        if not is_refusal or run.stopping.request is not None:
            return False
        what = str(getattr(failure, "error_message", failure))
        self._repeated = self._repeated + 1 if what == self._last else 1
        self._last = what
        is_largest = run.slots.world_size == run.config.resources.max_slots
        return not is_largest and self._repeated < SAME_REFUSALS


def _can_help(failure: RankFailed | Stalled, run: TrialRun) -> bool:
    """Whether a restart may succeed. A mistake in the trial would fail again at once."""
    if isinstance(failure, Stalled):
        return True
    has_raised = failure.error_type is not None
    # A workload may be long: its batches count before it ends.
    has_trained = run.has_trained or (failure.batches_trained or 0) > run.batches_trained
    return not failure.is_trial_mistake and (has_trained or not has_raised)


def _cause(failure: RankFailed | Stalled, run: TrialRun) -> tuple[object, ...]:
    """Identifies the cause of a failure. A restart does not help against the same cause twice.

    Two causes are equal if the same type of exception was raised at the same batch. The rank may
    differ, since often all raise and one is first; the text, since torch's have sizes of memory and
    process ids. A killed or hung rank equals
    no earlier one: its cause (memory, preemption) is usually outside the trial.
    """
    if isinstance(failure, Stalled) or failure.error_type is None:
        return (failure,)
    trained = failure.batches_trained
    return (
        failure.error_type, failure.during,
        run.batches_trained if trained is None else trained,
    )  # fmt: skip
