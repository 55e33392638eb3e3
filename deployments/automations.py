"""The automations of `trialflow deploy`: what Prefect's server does about lost runs.

A server on SQLite drops an event if another process writes while a trigger reads, before the
trigger has counted it. This affects events that a trigger expects, not events that it comes
`after`. Three rules follow:

- No trigger expects Crashed. None expects Running, which precedes Crashed, except the trigger that
  waits for the end of a crash.
- No trigger expects the state that its own action sets: it would fire again.
- Only a crashed run is rescheduled by force. If the news of a run's end is dropped, the server
  refuses the state Crashed, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from trialflow.flows.lifecycle.crash_limit import (
    MAX_ATTEMPTS,
    RESTART_CRASHED,
    SCHEDULED_AGAIN,
    TAG,
)
from trialflow.flows.lifecycle.stop_monitor import SILENT

# A run whose network is cut for ten minutes sends no heartbeats, and lives.
SILENCE_TIMEOUT = timedelta(minutes=12)
# From Pending to Running takes seconds; longer if the run downloads code or packages.
START_TIMEOUT = timedelta(minutes=10)
# How often within a day a run that ran before may crash again before its flow begins.
MAX_FAILED_STARTS = 5
# Prefect's minimum.
CRASH_SETTLING_TIME = timedelta(seconds=10)
# Set by a person or by the run itself: such a run is neither lost nor to be started.
FINAL_STATES = ("Cancelling", "Cancelled", "Failed", "Completed")
WAITING_STATES = ("Scheduled", "AwaitingRetry", "Paused", "Suspended")
# The state of a run whose start was lost, until it is scheduled again a moment later.
START_LOST = "StartLost"

FAIL_UNSTARTABLE = "trialflow: fail runs that cannot start"
CRASH_SILENT = "trialflow: mark silent runs as crashed"
REPEAT_LOST_STARTS = "trialflow: repeat lost starts"

FLOW_RUNS = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
OURS = ResourceSpecification(
    {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
)


def crash_lost_starts(pool: str) -> str:
    """Return the name of the automation for lost starts in a process work pool."""
    return f"trialflow: mark lost starts in {pool} as crashed"


def automations(process_pools: Iterable[str]) -> list[AutomationCore]:
    """Return all automations; those for lost starts only for these process work pools."""
    return [
        _automation(
            RESTART_CRASHED,
            "Schedules a crashed trialflow run (killed, out of memory, machine lost) again under "
            "the same id. It resumes from its last committed checkpoint. A run that crashes more "
            "often than its max_restarts fails by itself, once its flow begins.",
            # A process worker reports a crash twice, a second apart. The second report must not
            # come after the run is scheduled again: it would stay crashed, or start twice.
            _not_followed(
                "Crashed",
                within=CRASH_SETTLING_TIME,
                expect=("heartbeat", "Pending", "Running", *FINAL_STATES),
                # Only runs that have run before: others, which cannot start, would crash for ever.
                labels={"prefect.run-count": [str(count + 1) for count in range(MAX_ATTEMPTS)]},
            ),
            _schedule_again(SCHEDULED_AGAIN),
        ),
        _fail_unstartable(),
        _automation(
            CRASH_SILENT,
            f"Marks a trialflow run as crashed after {_minutes(SILENCE_TIMEOUT)} without a "
            "heartbeat (one is due every 30 s): its machine is lost, or the run was killed "
            "together with its worker.",
            # A run that waits in its queue sends no heartbeats.
            _not_followed(
                "heartbeat",
                within=SILENCE_TIMEOUT,
                expect=("heartbeat", *WAITING_STATES, *FINAL_STATES),
            ),
            _mark_crashed("Crashed", f"{SILENT} {_minutes(SILENCE_TIMEOUT)}"),
        ),
        *map(_crash_lost_starts, process_pools),
        _automation(
            REPEAT_LOST_STARTS,
            "Schedules a trialflow run whose start was lost again.",
            EventTrigger(
                posture=Posture.Reactive,
                expect=_events(START_LOST),
                match=FLOW_RUNS,
                match_related=OURS,
                for_each={"prefect.resource.id"},
                threshold=1,
            ),
            _schedule_again("Its start was lost: scheduled again"),
        ),
    ]


def _fail_unstartable() -> AutomationCore:
    # The flow counts its crashes by itself, but only once it runs. The server counts the others: it
    # increments a run's count when its flow begins, so one bucket holds the failed starts alone.
    rescheduled = _events("AwaitingRetry")
    return _automation(
        FAIL_UNSTARTABLE,
        f"Fails a trialflow run that was scheduled again after a crash, and then crashed "
        f"{MAX_FAILED_STARTS} times in a row before its flow began.",
        EventTrigger(
            posture=Posture.Reactive,
            # The first of these events opens the bucket, and does not count. Without `after`, the
            # server could drop them, and would ignore the run for a day after the trigger fired.
            after=rescheduled,
            expect=rescheduled,
            within=timedelta(days=1),
            match=ResourceSpecification(
                {**FLOW_RUNS.root, "prefect.state-message": SCHEDULED_AGAIN}
            ),
            match_related=OURS,
            for_each={"prefect.resource.id", "prefect.run-count"},
            threshold=MAX_FAILED_STARTS,
        ),
        ChangeFlowRunState(
            state=StateType.FAILED,
            name="Failed",
            message=f"The run crashed {MAX_FAILED_STARTS} times in a row before its flow began. "
            "The worker's log shows the cause: for example a broken environment, or a folder that "
            "this worker does not have. Once that is removed, retry the run: it resumes from its "
            "last committed checkpoint",
            force=False,
        ),
    )


def _crash_lost_starts(pool: str) -> AutomationCore:
    # Not for containers: they may be Pending for any time, while the image is pulled or a node is
    # found, and a second one would start next to the first. The pool is matched by name, because
    # heartbeats do not tell its type.
    in_pool = ResourceSpecification(
        {"prefect.resource.role": "work-pool", "prefect.resource.name": pool}
    )
    return _automation(
        crash_lost_starts(pool),
        f"Marks the start of a trialflow run in the process work pool {pool} as lost if the run "
        f"sends no heartbeat within {_minutes(START_TIMEOUT)} after a worker has taken it: the "
        "worker was stopped, or its machine was lost.",
        _not_followed(
            "Pending",
            within=START_TIMEOUT,
            expect=("heartbeat", "Pending", *FINAL_STATES),  # Pending: another start begins
            related=(OURS, in_pool),
        ),
        _mark_crashed(START_LOST, f"No heartbeat for {_minutes(START_TIMEOUT)} after its start"),
    )


def _automation(
    name: str, description: str, trigger: EventTrigger, action: ChangeFlowRunState
) -> AutomationCore:
    return AutomationCore(name=name, description=description, trigger=trigger, actions=[action])


def _not_followed(
    event: str,
    within: timedelta,
    expect: Iterable[str],
    labels: Mapping[str, list[str]] | None = None,
    related: Iterable[ResourceSpecification] = (OURS,),
) -> EventTrigger:
    """A trigger for each trialflow run: no event of `expect` within this time after `event`."""
    return EventTrigger(
        posture=Posture.Proactive,
        after=_events(event),
        expect=_events(*expect),
        within=within,
        match=ResourceSpecification({**FLOW_RUNS.root, **(labels or {})}),
        match_related=[*related],
        for_each={"prefect.resource.id"},
        threshold=1,
    )


def _schedule_again(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(
        state=StateType.SCHEDULED, name="AwaitingRetry", message=message, force=True
    )


def _mark_crashed(name: str, message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, name=name, message=message, force=False)


def _events(*names: str) -> set[str]:
    return {f"prefect.flow-run.{name}" for name in names}


def _minutes(duration: timedelta) -> str:
    return f"{duration.seconds // 60} minutes"
