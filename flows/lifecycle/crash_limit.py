"""A run that crashes again and again is not started for ever.

An automation (`trialflow deploy`) schedules a run that has crashed again, under the same id. It
cannot know the run's `max_restarts`; the run does, and refuses to begin once too often.
"""

from __future__ import annotations

from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client

from trial_core.errors import TrialflowError

SCHEDULED_AGAIN = "The run had crashed: scheduled again by trialflow's automation"
# Not those that Prefect itself puts in between, such as Late.
_SCHEDULED = ("Scheduled", "AwaitingRetry")


class CrashedTooOften(TrialflowError):
    """A run has crashed more often than its experiment allows."""


def check_crash_limit(max_restarts: int) -> None:
    """Called at the beginning of a flow run, in its thread.

    Only what the automation has scheduled counts: whoever retries the run by hand, once its cause
    was found, begins a new count.

    Raises:
        CrashedTooOften: this attempt follows a crash, and as many crashes as `max_restarts` allows
            have been followed by an attempt already.
    """
    if runtime.deployment.id is None:
        return  # no automation sees it
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(str(runtime.flow_run.id)))
    scheduled = [state for state in states if state.name in _SCHEDULED]
    scheduled.sort(key=lambda state: state.timestamp)
    count = 0
    for state in reversed(scheduled):
        if state.message != SCHEDULED_AGAIN:
            break
        count += 1
    if count > max_restarts:
        raise CrashedTooOften(
            f"the run has crashed {count} times in a row, and max_restarts is {max_restarts}: see "
            "why in the logs of its attempts; a retry goes on from its last committed checkpoint"
        )
