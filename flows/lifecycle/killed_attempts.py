"""Shows in the timeline that tasks and subflows ended when their run's process was killed.

A killed process reports nothing, so the server shows them as Running until somebody says otherwise.
"""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

_UNENDED = [StateType.PENDING, StateType.RUNNING]
_MESSAGE = "The process was killed; another attempt at the run has begun"


def settle_killed_attempts(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Set what earlier attempts at a flow run left running to Crashed.

    Call it before this attempt starts a task or a subflow. Runs of deployments have processes that
    live on. Raises as Prefect's client.
    """
    children = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNENDED)),
    )
    for child in client.read_flow_runs(flow_run_filter=children):
        if child.deployment_id is None:
            settle_killed_attempts(client, child.id)
            client.set_flow_run_state(child.id, Crashed(message=_MESSAGE), force=True)
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_UNENDED))
        ),
    )
    for each in tasks:
        if each.state is None or each.state.state_details.child_flow_run_id is None:
            client.set_task_run_state(each.id, Crashed(message=_MESSAGE), force=True)
