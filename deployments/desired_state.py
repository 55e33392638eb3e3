"""What a Prefect server should have for trialflow: read from the files beside this one, or told
here. Nothing in this module speaks to a server; `trialflow.deployments.resources` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.resources import files
from typing import Any, Literal

import yaml
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from trial_core.errors import ConfigError
from trialflow.flows.lifecycle.crash_limit import SCHEDULED_AGAIN

PoolType = Literal["process", "docker", "kubernetes"]

# What Prefect takes in no name.
BANNED_IN_NAMES = "/%&<>"
TAG = "trialflow"
MOST_ATTEMPTS = 50
SILENCE = timedelta(minutes=5)
# From Pending to Running a process takes seconds; more if somebody has it fetch code or packages.
START_LIMIT = timedelta(minutes=10)
# Prefect's shortest.
SETTLED = timedelta(seconds=10)
# States that a person, or the run itself, has set: it is neither lost nor to be started.
SETTLED_STATES = ("Cancelling", "Cancelled", "Failed", "Completed")
WAITING_STATES = ("Scheduled", "AwaitingRetry", "Paused", "Suspended")
# The state of a run whose start was lost, until it is scheduled again, which is soon.
START_LOST = "StartLost"

CRASHED_RUNS_GO_ON = "trialflow: crashed runs go on"
SILENT_RUNS_HAVE_CRASHED = "trialflow: silent runs have crashed"
LOST_STARTS_ARE_REPEATED = "trialflow: lost starts are repeated"

A_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
OURS = ResourceSpecification(
    {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
)


@dataclass(frozen=True)
class DesiredDeployment:
    """A deployment as ``prefect.yaml`` describes it.

    Attributes:
        name: the deployment's.
        entrypoint: module and function of its flow.
        description, tags: as Prefect takes them.
        parameters: the defaults at first; people may change them.
        from_file: those that a file of the user's gives, each time that it is deployed.
        environment: environment variables of its runs.
    """

    name: str
    entrypoint: str
    description: str
    tags: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    from_file: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeploymentTarget:
    """Where the runs of a deployment are to be.

    Attributes:
        pool: the work pool that runs them.
        directory: their working folder; None: wherever the pool starts them.
        keeps_pool, keeps_directory: whether a deployment that is there already keeps its own.
    """

    pool: str
    directory: str | None
    keeps_pool: bool = False
    keeps_directory: bool = False


def check_pool_name(name: str) -> None:
    """Refuse what cannot be the name of a work pool.

    Raises:
        ConfigError: it cannot.
    """
    if not name.strip() or set(name) & set(BANNED_IN_NAMES):
        raise ConfigError(
            f"--pool {name!r} cannot be the name of a work pool: it must not be empty, nor have "
            f"any of {' '.join(BANNED_IN_NAMES)} in it"
        )


def job_template(pool_type: PoolType) -> dict[str, Any]:
    """The base job template of our work pools of a type."""
    file = files("trialflow.deployments") / "work_pools" / f"{pool_type}.json"
    template: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return template


def deployments() -> list[DesiredDeployment]:
    """The deployments in our ``prefect.yaml``."""
    described = yaml.safe_load((files("trialflow.deployments") / "prefect.yaml").read_text("utf-8"))
    return [
        DesiredDeployment(
            name=each["name"],
            entrypoint=each["entrypoint"],
            description=each["description"],
            tags=each["tags"],
            parameters=each.get("parameters", {}),
            environment=each["work_pool"]["job_variables"]["env"],
        )
        for each in described["deployments"]
    ]


def lost_starts_have_crashed(pool: str) -> str:
    """The name of the automation for the starts of a process work pool's runs."""
    return f"trialflow: lost starts in {pool} have crashed"


def automations(process_pools: Iterable[str]) -> list[AutomationCore]:
    """What Prefect does by itself when a run of ours is lost; its start only in those work pools.

    A server on SQLite gives an event up if others write while a trigger that waits for something
    reads before it counts the event, as it does with one that it expects, not with one that comes
    `after`. So nobody expects Crashed, nor Running, on which Crashed follows, unless there is a
    crash to be taken up already. Nor does that one expect what it brings about: it would fire
    again. If news that a run has ended are lost nothing comes of it: without force, it does not
    become Crashed.
    """
    return [
        _crashed_runs_go_on(),
        _silent_runs_have_crashed(),
        *map(_lost_starts_have_crashed, process_pools),
        _lost_starts_are_repeated(),
    ]


def _crashed_runs_go_on() -> AutomationCore:
    return AutomationCore(
        name=CRASHED_RUNS_GO_ON,
        description="A trialflow run that has crashed (killed, out of memory, its machine lost) is "
        "scheduled again under the same id, and goes on from its last committed checkpoint. The "
        "run itself ends as failed when it has crashed more often than its max_restarts.",
        # A process worker reports a crash twice, a second apart. The second report must not find a
        # run that is scheduled again: it would be left as crashed, or started twice.
        trigger=_nothing_follows(
            "Crashed",
            within=SETTLED,
            expect=("heartbeat", "Pending", "Running", *SETTLED_STATES),
            # It has run before: what cannot be started at all would crash for ever.
            labels={"prefect.run-count": [str(count + 1) for count in range(MOST_ATTEMPTS)]},
        ),
        actions=[_schedule_again(SCHEDULED_AGAIN)],
    )


def _silent_runs_have_crashed() -> AutomationCore:
    return AutomationCore(
        name=SILENT_RUNS_HAVE_CRASHED,
        description=f"A trialflow run that says nothing for {SILENCE.seconds // 60} minutes (it "
        "sends a heartbeat every 30 s) is taken for dead: its machine is lost, or its worker was "
        "killed with it.",
        # A run that has been put back into its queue is silent and well.
        trigger=_nothing_follows(
            "heartbeat",
            within=SILENCE,
            expect=("heartbeat", *WAITING_STATES, *SETTLED_STATES),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                message=f"Nothing was heard of this run for {SILENCE.seconds // 60} minutes",
                force=False,
            )
        ],
    )


def _lost_starts_have_crashed(pool: str) -> AutomationCore:
    in_pool = ResourceSpecification(
        {"prefect.resource.role": "work-pool", "prefect.resource.name": pool}
    )
    return AutomationCore(
        name=lost_starts_have_crashed(pool),
        description=f"The start of a trialflow run of the process work pool {pool} is lost when "
        f"the run has sent no heartbeat {START_LIMIT.seconds // 60} minutes after a worker has "
        "taken it: the worker was stopped, or its machine was lost.",
        # Not a container's: it is Pending while its image is pulled, or a node is found, which may
        # take any time; a second one would be started beside it. The pool's type is known of what
        # the server says of a run, but not of its heartbeats; its name is.
        trigger=_nothing_follows(
            "Pending",
            within=START_LIMIT,
            # Pending too: it is another start then, which has the whole time again.
            expect=("heartbeat", "Pending", *SETTLED_STATES),
            related=(OURS, in_pool),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=START_LOST,
                message=f"Nothing for {START_LIMIT.seconds // 60} minutes after it was taken",
                force=False,
            )
        ],
    )


def _lost_starts_are_repeated() -> AutomationCore:
    return AutomationCore(
        name=LOST_STARTS_ARE_REPEATED,
        description="A trialflow run whose start was lost is scheduled again.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect=_events(START_LOST),
            match=A_RUN,
            match_related=OURS,
            for_each={"prefect.resource.id"},
            threshold=1,
        ),
        actions=[_schedule_again("Its start was lost: scheduled again")],
    )


def _nothing_follows(
    event: str,
    within: timedelta,
    expect: Iterable[str],
    labels: Mapping[str, list[str]] | None = None,
    related: Iterable[ResourceSpecification] = (OURS,),
) -> EventTrigger:
    """Fires for a run of ours when an event is followed by none of the expected in that time."""
    return EventTrigger(
        posture=Posture.Proactive,
        after=_events(event),
        expect=_events(*expect),
        within=within,
        match=ResourceSpecification({**A_RUN.root, **(labels or {})}),
        match_related=[*related],
        for_each={"prefect.resource.id"},
        threshold=1,
    )


def _schedule_again(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(
        state=StateType.SCHEDULED, name="AwaitingRetry", message=message, force=True
    )


def _events(*names: str) -> set[str]:
    return {f"prefect.flow-run.{name}" for name in names}
