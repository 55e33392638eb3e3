"""Sets this flow run's state, where Prefect would set another one or log an error."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Suspended

from trialflow.tasks.client_retries import NO_ANSWER, client_retries


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
    with (
        client_retries(0),
        get_client(sync_client=True) as client,
    ):
        state = client.read_flow_run(flow_run_id).state
        if state is None or state.type != StateType.PAUSED:
            return
        details = state.state_details
        if details.pause_timeout is not None or not details.pause_reschedule:
            held: State[Any] = Suspended(message="It waits until it is resumed or cancelled")
            client.set_flow_run_state(flow_run_id, held, force=True)
