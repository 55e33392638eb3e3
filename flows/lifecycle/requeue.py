"""Puts a deployment's run that was stopped from outside back into its queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import AwaitingRetry

from trialflow.flows.lifecycle.flow_run_state import set_state
from trialflow.tasks.client_retries import NO_ANSWER


def has_queue(run: FlowRun | None) -> bool:
    """Return whether a worker took the run from a queue. A subflow has no queue."""
    return run is not None and run.deployment_id is not None and run.parent_task_run_id is None


def requeue(reason: str) -> bool:
    """Put this flow run back into its queue; return whether the server accepted it."""
    return set_state(AwaitingRetry(message=reason))


@contextmanager
def requeue_if_stopped(waiting_for: str) -> Iterator[None]:
    """Put the run back into its queue if it is stopped within the block.

    For waits in the flow's thread before the stop monitor handles signals. A run that is stopped
    there has nothing to save.

    Raises:
        Abort: the run is back in its queue.
        TerminationSignal: the run has no queue, or was cancelled meanwhile.
    """
    try:
        yield
    except TerminationSignal:
        reason = f"stopped while it waited for {waiting_for}"
        if _is_still_running() and requeue(reason):
            raise Abort(f"{reason}: scheduled again") from None
        raise


def _is_still_running() -> bool:
    """Return whether this flow run has a queue, and the server still shows it as running."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not has_queue(run):
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run.id).state
    except NO_ANSWER:
        return False
    return state is not None and state.type == StateType.RUNNING
