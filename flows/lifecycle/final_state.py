"""Decides what state a flow run gets that was asked to stop. Pure: facts in, steps out.

`StopMonitor.final_state` reads the facts and carries the steps out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prefect.client.schemas.objects import StateType

from trial_core.schedule.stop_requests import StopReason

CANCEL_STATES = (StateType.CANCELLING, StateType.CANCELLED)
_REQUEUED = ("preempted", "server lost")


@dataclass(frozen=True)
class StoppedRun:
    """What is known of a flow run that was asked to stop, and has saved or failed.

    Attributes:
        reason: why it was asked, as `StopRequest.reason`.
        state: the type of its state on the server; None if the server does not answer, or if the
            flow run was deleted.
        has_other_attempt: True if another process has started the run since.
        is_subflow: True for the run of a flow that another flow has called.
        is_suspended: True if Prefect has asked this process to suspend the run.
        ends_with_parent: True if the run that it is part of ends.
        is_in_main_thread: True if the flow runs in the thread that gets signals.
        has_queue: True if the run can be scheduled again.
    """

    reason: StopReason
    state: StateType | None = None
    has_other_attempt: bool = False
    is_deployed: bool = False
    is_subflow: bool = False
    is_suspended: bool = False
    ends_with_parent: bool = False
    is_in_main_thread: bool = True
    has_signal: bool = False
    has_queue: bool = False


class Step(Enum):
    """A step that ends a stopped run."""

    LEAVE_TO_OTHER_ATTEMPT = "the server's state stays: it is another attempt's"
    CANCEL_UNRESUMABLE = "the state is Cancelled: a run without a deployment cannot be resumed"
    HOLD_PAUSE = "the run stays paused"
    SUSPEND = "the run is suspended"
    SUSPEND_WITH_PARENT = "the run is Cancelled, and continues when its parent does"
    CANCEL = "the state is Cancelled"
    LEAVE_TO_PREFECT = "Prefect sets the state"
    KEEP_STATE = "the server's state stays"
    END_BY_SIGNAL = "the signal ends the run"
    REQUEUE = "the run is scheduled again"


def steps_to_end(run: StoppedRun) -> tuple[Step, ...]:
    """The steps that end a stopped run. The first that ends it is the last.

    `Step.REQUEUE` may fail, if Prefect does not accept the state; and `Step.END_BY_SIGNAL`, if the
    handler of the signal returns.
    """
    if run.has_other_attempt:
        return (Step.LEAVE_TO_OTHER_ATTEMPT,)
    if run.state == StateType.PAUSED:
        can_be_resumed = run.is_deployed or run.is_subflow
        return (Step.HOLD_PAUSE if can_be_resumed else Step.CANCEL_UNRESUMABLE,)
    if run.is_suspended or (run.ends_with_parent and run.reason == "suspended"):
        is_shown_by_parent = run.is_subflow and not run.is_deployed
        return (Step.SUSPEND_WITH_PARENT if is_shown_by_parent else Step.SUSPEND,)
    if run.state in CANCEL_STATES:
        return (Step.CANCEL,)
    if run.reason == "time budget":
        return (Step.LEAVE_TO_PREFECT,)
    if run.state not in (None, StateType.RUNNING):
        return (Step.KEEP_STATE,)
    by_signal = (Step.END_BY_SIGNAL,) if run.has_signal else ()
    if run.is_subflow and (run.ends_with_parent or not run.is_in_main_thread):
        return (*(by_signal if run.is_in_main_thread else ()), Step.CANCEL)
    can_requeue = run.state is not None and run.has_queue and run.reason in _REQUEUED
    first = (Step.REQUEUE,) if can_requeue else ()
    if run.state is not None and run.reason == "server lost":  # the server is back
        return (*first, Step.CANCEL)
    return (*first, *by_signal, Step.KEEP_STATE)
