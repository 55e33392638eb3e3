"""Shares a failure of one rank with all ranks, so that none waits for the failed one.

Use it for storage operations, which may fail on any rank at any time. In training, a rank cannot
reach peers that wait in a DeepSpeed collective: it raises at once, and its launcher ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from trial_core import errors
from trial_core.errors import TrialflowError
from trial_core.rank.collectives.distributed import DistributedContext

T = TypeVar("T")


class Outcome(NamedTuple):
    """How work ended on one rank: its result, or the class name and message of its error."""

    result: Any = None
    error_type: str | None = None
    message: str = ""

    def raise_error(self) -> None:
        """Raise the error, if any, as one of the class that `error_type` names."""
        if self.error_type is None:
            return
        known = getattr(errors, self.error_type, None)
        if known is None or known is errors.RankFailed:  # RankFailed takes more than a message
            raise TrialflowError(f"{self.error_type}: {self.message}")
        raise known(self.message)


def outcome_of(work: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(work())
    except TrialflowError as error:
        return Outcome(None, type(error).__name__, str(error))


def run_on_all_ranks(distributed: DistributedContext, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank; the results of all ranks. Collective: every rank calls this.

    Raises, on every rank, the TrialflowError of the first rank on which `work` failed.
    """
    outcomes: list[Outcome] = distributed.allgather(outcome_of(work))
    for rank, outcome in enumerate(outcomes):
        outcome._replace(message=f"rank {rank}: {outcome.message}").raise_error()
    return [outcome.result for outcome in outcomes]


def run_on_rank_0(distributed: DistributedContext, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone; its result, or its TrialflowError, on every rank. Collective."""
    own = outcome_of(work) if distributed.get_rank() == 0 else None
    outcome: Outcome = distributed.broadcast(own)
    outcome.raise_error()
    result: T = outcome.result
    return result
