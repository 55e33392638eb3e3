"""Sets this flow run's state, where Prefect would set another one or log an error."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger


def set_state(state: State[Any]) -> bool:
    """Set this flow run's state; return whether the server accepted it."""
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(str(runtime.flow_run.id)), state, force=True)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().error("the run's state cannot be set to %s: %s", state.name, error)
        return False
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        # Prefect's last line in the log names this state, and a final one is no crash.
        context.flow_run.state = state
    return True
