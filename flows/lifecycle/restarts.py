"""Whether ranks that have failed are launched again, and when."""

from __future__ import annotations

from trial_core.errors import RankFailed, Stalled
from trialflow.tasks.run import TrialRun

LONGEST_PAUSE_SECONDS = 60


class Restarts:
    """The restarts of one run of the flow.

    Attributes:
        count: how many there were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._last_cause: tuple[object, ...] | None = None

    def grant(self, failure: RankFailed | Stalled, run: TrialRun) -> bool:
        """Whether to start again after `failure`; that restart is counted."""
        cause = _cause(failure, run)
        if self.count == self.limit or cause == self._last_cause:
            return False
        if not _worth_a_restart(failure, run):
            return False
        self.count, self._last_cause = self.count + 1, cause
        return True

    @property
    def pause_seconds(self) -> int:
        """How long to wait before the last restart: not at all before the first."""
        return 0 if self.count <= 1 else min(2 ** (self.count - 1), LONGEST_PAUSE_SECONDS)


def _worth_a_restart(failure: RankFailed | Stalled, run: TrialRun) -> bool:
    """Whether starting again may help: a mistake in the trial would come again at once."""
    if isinstance(failure, Stalled):
        return True
    raised = failure.error_type is not None
    return not failure.is_trial_mistake and (run.has_trained or not raised)


def _cause(failure: RankFailed | Stalled, run: TrialRun) -> tuple[object, ...]:
    """What is the same when a failure comes again, for which no further restart is spent.

    An exception: who raised what, during what, after how many batches. A death never is the same:
    whatever ends processes (memory, preemption) leaves no such trace; nor is a hang.
    """
    if isinstance(failure, Stalled) or failure.error_type is None:
        return (failure,)
    return (
        failure.rank, failure.error_type, failure.error_message, failure.during,
        run.batches_trained,
    )  # fmt: skip
