"""The states of a run, and their order.

`Driver` (`drive.py`) carries out each of them, and returns the next::

    Launching ──► Completed ──► Ended
                            └─► Moving ──► Launching        on other nodes
              ──► Aborted ────► Ended, Moving, or raises `Stopped`
              ──► RanksFailed ► Restarting ──► Launching, or raises the failure
"""

from __future__ import annotations

from dataclasses import dataclass

from trial_core.common.text_format import plural
from trial_core.driver.failure_policy import Failure, Relaunch
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Launch
from trial_core.errors import Stopped


@dataclass(frozen=True)
class Launching:
    """The ranks are launched next; those before them may have `saved`, to move to other nodes."""

    saved: TrialResult | None = None


@dataclass(frozen=True)
class Completed:
    """The ranks have trained until the run ended, was stopped, or is to move."""

    launch: Launch
    result: TrialResult


@dataclass(frozen=True)
class Aborted:
    """The ranks were ended without a result, by a stop request or to move."""

    launch: Launch
    why: Stopped
    saved: TrialResult | None


@dataclass(frozen=True)
class RanksFailed:
    """The ranks have failed, or could not be launched."""

    launch: Launch
    failure: Failure


@dataclass(frozen=True)
class Restarting:
    """The ranks are launched again after a failure, as the policy has decided."""

    failure: Failure
    decision: Relaunch


@dataclass(frozen=True)
class Moving:
    """The ranks are launched on other nodes next. `what` tells people if they saved, and why."""

    what: str
    saved: TrialResult | None = None


@dataclass(frozen=True)
class Ended:
    """The run is over."""

    launch: Launch
    result: TrialResult


RunState = Launching | Completed | Aborted | RanksFailed | Restarting | Moving | Ended


def describe(state: RunState) -> str:
    """A state in a few words, for the story of a run that has failed."""
    if isinstance(state, Launching):
        return "launching"
    if isinstance(state, RanksFailed):
        ranks, at = state.launch.world_size, state.launch.status.batches_trained
        return f"{plural(ranks, 'rank')} failed at batch {at} ({type(state.failure).__name__})"
    if isinstance(state, Restarting):
        return f"restarting{_described(state.decision)}"
    if isinstance(state, Aborted):
        return f"ended without a result ({state.why})"
    if isinstance(state, Moving):
        return f"moving ({state.what})"
    return type(state).__name__.lower()


def _described(decision: Relaunch) -> str:
    if decision.micro_batch_samples is not None:
        return f" with micro-batches of {plural(decision.micro_batch_samples, 'sample')}"
    if decision.leaves_out is not None:
        return f" with fewer ranks than {decision.leaves_out}"
    if decision.retreats:
        return " on the nodes that have trained"
    return f" without node {decision.leaves}" if decision.leaves is not None else ""
