"""A run of a deployment that is stopped from outside goes back into its queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry


def came_from_a_queue(run: FlowRun | None) -> bool:
    """Whether a worker has taken it from one; a flow that another has called did not."""
    return run is not None and run.deployment_id is not None and run.parent_task_run_id is None


def is_to_go_on() -> bool:
    """Whether this flow's run came from a queue, and nobody has decided otherwise since."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not came_from_a_queue(run):
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run.id).state
    except (httpx.HTTPError, PrefectException):
        return False
    return state is not None and state.type == StateType.RUNNING


def is_back_in_its_queue(why: str) -> bool:
    """Put this flow's run there; whether that could be done."""
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(
                UUID(str(runtime.flow_run.id)), AwaitingRetry(message=why), force=True
            )
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().error("the run cannot be put back into its queue: %s", error)
        return False
    return True


@contextmanager
def requeue_if_stopped(what: str) -> Iterator[None]:
    """For a block that waits in the flow's thread, before signals are taken: a run that is stopped
    meanwhile has nothing to save, and goes back into its queue where it came from one."""
    try:
        yield
    except TerminationSignal:
        why = f"stopped while it waited for {what}"
        if is_to_go_on() and is_back_in_its_queue(why):
            raise Abort(f"{why}: scheduled again") from None
        raise
