"""This flow run on the server: reads it, sets its state, and puts it back into its queue.

A proxy may answer 404 while the server behind it restarts. So may another service at its address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Suspended

from trialflow.tasks.client_retries import NO_ANSWER, client_retries

# A run counts as deleted if a healthy server has not known it for this long.
DELETION_SECONDS = 60.0


class FlowRunReader:
    """Reads one flow run. Several threads may use it."""

    def __init__(self, flow_run_id: UUID, clock: Callable[[], float] = time.monotonic) -> None:
        self.flow_run_id = flow_run_id
        self._clock = clock
        self._missing_since: float | None = None
        self._is_deleted = False

    def read(self) -> FlowRun | None:
        """The flow run; None if it was deleted: a healthy server did not know it for a minute.

        Raises:
            ObjectNotFound: the answer is 404, and does not yet prove a deletion.
            httpx.HTTPError, PrefectException: the server did not answer.
        """
        if self._is_deleted:
            return None
        missing_since = None
        try:
            with get_client(sync_client=True) as client:
                try:
                    return client.read_flow_run(self.flow_run_id)
                except ObjectNotFound:
                    if not is_healthy(client):
                        raise
                    now = self._clock()
                    missing_since = now if self._missing_since is None else self._missing_since
                    self._is_deleted = now - missing_since >= DELETION_SECONDS
                    if not self._is_deleted:
                        raise
                    return None
        finally:
            self._missing_since = missing_since


def is_healthy(client: SyncPrefectClient) -> bool:
    """Return whether the health check gives Prefect's answer, the JSON value true."""
    try:
        return client.request("GET", "/health").json() is True
    except (httpx.HTTPError, PrefectException, ValueError):
        return False


def set_state(state: State[Any]) -> bool:
    """Set this flow run's state; return whether the server accepted it."""
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(str(runtime.flow_run.id)), state, force=True)
    except NO_ANSWER as error:
        get_run_logger().error("the run's state cannot be set to %s: %s", state.name, error)
        return False
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        # Prefect's last line in the log names this state, and a final state is not a crash.
        context.flow_run.state = state
    return True


def hold_suspended(flow_run_id: UUID) -> None:
    """Have a paused flow run wait for its Resume without a limit. Raises as Prefect's client.

    Prefect fails a run whose pause has expired: after 300 s, if the UI's Pause is pressed. A pause
    that expects a living process becomes one that starts the run again.
    """
    with client_retries(0), get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
        if state is None or state.type != StateType.PAUSED:
            return
        details = state.state_details
        if details.pause_timeout is not None or not details.pause_reschedule:
            held: State[Any] = Suspended(message="It waits until it is resumed or cancelled")
            client.set_flow_run_state(flow_run_id, held, force=True)


def has_queue(run: FlowRun | None) -> bool:
    """Return whether a worker took the run from a queue. A subflow has no queue."""
    return run is not None and run.deployment_id is not None and run.parent_task_run_id is None


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
        if _is_still_running() and set_state(AwaitingRetry(message=reason)):
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
