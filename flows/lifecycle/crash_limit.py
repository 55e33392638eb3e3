"""Limits how often a crashed flow run is restarted.

An automation (`trialflow deploy`) schedules a crashed run again, under the same id, unless
`restarted_engine` has begun it again before, or `trialflow up` has found it without a process. None
of them knows the run's `max_restarts`. So the run itself fails if it has crashed too often.
"""

from __future__ import annotations

from itertools import takewhile
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Crashed

from trial_core.errors import TrialflowError

TAG = "trialflow"
"""The tag of runs that are restarted after a crash."""
RESTART_CRASHED = "trialflow: restart crashed runs"
"""The name of the automation. While it is paused, no crashed run is restarted."""
MAX_ATTEMPTS = 50
SCHEDULED_AGAIN = "The run had crashed: scheduled again by trialflow's automation"
RESTARTED = "The run's process was killed: it begins again on the same machine"
FOUND = "The run had no process any more: scheduled again by `trialflow up`"
# Prefect's own intermediate states, such as Late, do not count.
_SCHEDULED = ("Scheduled", "AwaitingRetry")


class CrashedTooOften(TrialflowError):
    """A flow run has crashed more often than its experiment's `max_restarts` allows."""


def may_begin_again(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Return whether a run whose process is gone is to begin again, as `RESTART_CRASHED` does."""
    return (
        run.deployment_id is not None
        and TAG in run.tags
        and run.run_count <= MAX_ATTEMPTS
        and any(each.enabled for each in client.read_automations_by_name(RESTART_CRASHED))
    )


def check_crash_limit(max_restarts: int) -> None:
    """Fail a run that crashed too often. Call it first, in the flow's thread.

    It also has the timeline show how the run's killed attempts ended. Only consecutive restarts
    count: a retry by hand starts a new count.

    Raises:
        CrashedTooOften: the run was restarted more than `max_restarts` times.
    """
    if runtime.deployment.id is None:
        return  # automations restart runs of deployments alone
    flow_run_id = UUID(str(runtime.flow_run.id))
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(flow_run_id)
        if sum(state.type == StateType.RUNNING for state in states) > 1:
            settle_killed_attempts(client, flow_run_id)
    starts = [state for state in states if state.name in _SCHEDULED or state.message == RESTARTED]
    starts.sort(key=lambda state: state.timestamp)
    after_crash = (SCHEDULED_AGAIN, RESTARTED, FOUND)
    count = len([*takewhile(lambda state: state.message in after_crash, reversed(starts))])
    if count > max_restarts:
        raise CrashedTooOften(
            f"the run has crashed {count} times in a row, and max_restarts is {max_restarts}. The "
            "logs of its attempts show the cause. Once that is removed, retry the run: it resumes "
            "from its last committed checkpoint"
        )


def settle_killed_attempts(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Set what earlier attempts at a flow run left running to Crashed: nothing else would say it.

    Call it before this attempt starts a task or a subflow. Runs of deployments have processes that
    live on. Raises as Prefect's client.
    """

    def ended() -> State[None]:  # one for each run: Prefect's client writes into it
        return Crashed(message="The process was killed; another attempt at the run has begun")

    begun = {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    of_run = {"any_": [flow_run_id]}
    children = FlowRunFilter.model_validate({"parent_flow_run_id": of_run, **begun})
    for child in client.read_flow_runs(flow_run_filter=children):
        if child.deployment_id is None:
            settle_killed_attempts(client, child.id)
            client.set_flow_run_state(child.id, ended(), force=True)
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": of_run}),
        task_run_filter=TaskRunFilter.model_validate(begun),
    )
    for each in tasks:
        if each.state is None or each.state.state_details.child_flow_run_id is None:
            client.set_task_run_state(each.id, ended(), force=True)
