"""Work that may fail on one rank, without leaving the others behind.

For reading and writing of storage, which may fail anywhere at any time. Not for training: a rank
whose peers are inside a collective of DeepSpeed's cannot tell them anything, so it raises at once
and its launcher ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from trial_core import errors
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialflowError

T = TypeVar("T")


class Outcome(NamedTuple):
    """How work has ended on one rank: its result, or the name and message of its error."""

    result: Any = None
    error_type: str | None = None
    message: str = ""


def attempt(work: Callable[[], Any]) -> Outcome:
    """Do `work`; what it gave, or which of our errors it raised."""
    try:
        return Outcome(work())
    except TrialflowError as error:
        return Outcome(None, type(error).__name__, str(error))


def on_every_rank(distributed: DistributedContext, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank; everybody's results. Collective: every rank calls this.

    Raises:
        TrialflowError: it failed on some rank; every rank raises the first one's error.
    """
    outcomes: list[Outcome] = distributed.allgather(attempt(work))
    for rank, outcome in enumerate(outcomes):
        raise_error(outcome._replace(message=f"rank {rank}: {outcome.message}"))
    return [outcome.result for outcome in outcomes]


def on_the_first_rank(distributed: DistributedContext, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone; its result, everywhere. Collective: every rank calls this.

    Raises:
        TrialflowError: it failed; every rank raises its error.
    """
    outcome: Outcome = distributed.broadcast(attempt(work) if distributed.get_rank() == 0 else None)
    raise_error(outcome)
    result: T = outcome.result
    return result


def raise_error(outcome: Outcome) -> None:
    """Raise the error that work has ended with, if it has.

    Raises:
        TrialflowError: that error, of its own class.
    """
    if outcome.error_type is not None:
        raise _error(outcome.error_type, outcome.message)


def _error(error_type: str, message: str) -> TrialflowError:
    known = getattr(errors, error_type, None)
    if known is None or known is errors.RankFailed:  # which takes more than a message
        return TrialflowError(f"{error_type}: {message}")
    error: TrialflowError = known(message)
    return error
