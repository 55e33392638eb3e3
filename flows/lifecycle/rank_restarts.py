"""Decides whether failed ranks are launched again, and when."""

from __future__ import annotations

from trial_core.errors import RankFailed, Stalled
from trialflow.tasks.trial_run import TrialRun

MAX_PAUSE_SECONDS = 60


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
