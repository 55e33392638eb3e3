"""What the `retraining` sections of experiments ask of a Prefect server: for each a deployment of
the flow `retrain`, its schedule, and an automation that runs it when data arrives.

Nothing in this module speaks to a server; `trialflow.deployments.retraining.model_resources` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import Event, Resource, ResourceSpecification
from pydantic import ValidationError

from trial_core.errors import ConfigError
from trial_core.models.data_templates import rendered
from trialflow.deployments.desired_state import DesiredDeployment, deployments

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig, RetrainingConfig

Schedule = CronSchedule | IntervalSchedule

ENTRYPOINT = "trialflow.flows.retrain.retrain"
FLOW = "retrain"
DATA_ARRIVED = "trialflow.data.arrived"
# Where intervals are counted from: a schedule is the same whenever it is deployed.
ANCHOR = "2020-01-01T00:00:00Z"


@dataclass(frozen=True)
class RetrainingRequest:
    """What one experiment's `retraining` section asks for.

    Attributes:
        model: whose retraining it is; the deployment's name.
        deployment: its deployment; the experiment is its parameter.
        schedule: when it runs by itself; None: never.
        on_data_arrived: whether it also runs when data arrives.
    """

    model: str
    deployment: DesiredDeployment
    schedule: Schedule | None
    on_data_arrived: bool


def resource_id(model: str) -> str:
    """What events about a model are about, as Prefect names resources."""
    return f"trialflow.model.{model}"


def retrainings(experiments: Mapping[Path, ExperimentConfig]) -> list[RetrainingRequest]:
    """What these experiment files ask for.

    Raises:
        ConfigError: one has no `retraining` section, a schedule that cannot be, data with a
            template that cannot be rendered, or a model whose name is taken.
    """
    found: dict[str, tuple[Path, RetrainingRequest]] = {}
    for path, config in experiments.items():
        retraining = _retraining(path, config)
        other, _ = found.setdefault(retraining.model, (path, retraining))
        if other != path:
            raise ConfigError(
                f"{path}: retraining.model: {retraining.model!r} is that of {other} too, and a "
                "model has one deployment: name another in one of them"
            )
    return [retraining for _, retraining in found.values()]


def template(model: str) -> DesiredDeployment:
    """The deployment of a model's retraining, as far as its file does not matter."""
    (general,) = (each for each in deployments() if each.entrypoint == ENTRYPOINT)
    return DesiredDeployment(
        name=model,
        entrypoint=ENTRYPOINT,
        description=f"Retrains the model {model}, and promotes what is better.",
        tags=general.tags,
        environment=general.environment,
    )


def _retraining(path: Path, config: ExperimentConfig) -> RetrainingRequest:
    asked = config.retraining
    if asked is None:
        raise ConfigError(
            f"{path}: has no `retraining` section, which says what `trialflow deploy` is to do "
            "with it; `retraining: {}` is one. To train it once: `prefect deployment run "
            f'train/train --params "$(trialflow config {path})"`'
        )
    model = asked.model
    _check_name(path, model)
    _check_templates(path, config)
    ours = template(model)
    return RetrainingRequest(
        model=model,
        deployment=DesiredDeployment(
            name=model,
            entrypoint=ours.entrypoint,
            description=ours.description,
            tags=ours.tags,
            environment=ours.environment,
            from_file={"config": config.model_dump(mode="json")},
        ),
        schedule=schedule_of(path, asked),
        on_data_arrived=asked.on_data_arrived,
    )


def _check_name(path: Path, model: str) -> None:
    if any(model == each.name for each in deployments() if each.entrypoint == ENTRYPOINT):
        raise ConfigError(
            f"{path}: retraining.model: {model!r} is the name of the deployment that retrains any "
            "model: name this one otherwise"
        )


def _check_templates(path: Path, config: ExperimentConfig) -> None:
    try:
        rendered(config.data, datetime.now(timezone.utc))
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None


def schedule_of(path: Path, asked: RetrainingConfig) -> Schedule | None:
    """When the retraining runs by itself, as Prefect has it.

    Raises:
        ConfigError: Prefect knows no such time, or it never comes.
    """
    if asked.schedule is None:
        return None
    zone = asked.schedule.timezone or "UTC"
    try:
        if asked.schedule.cron is None:
            return IntervalSchedule(
                interval=timedelta(seconds=asked.schedule.interval_seconds or 0),
                anchor_date=ANCHOR,
                timezone=zone,
            )
        schedule = CronSchedule(cron=asked.schedule.cron, timezone=zone)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(path, error))) from None
    if not _ever_comes(schedule):
        raise ConfigError(
            f"{path}: retraining.schedule.cron: {schedule.cron!r} never comes: there is no such day"
        )
    return schedule


def _lines(path: Path, error: ValidationError) -> list[str]:
    """What Prefect finds wrong, with the names of our fields."""
    ours = {"cron": "cron", "interval": "interval_seconds"}
    found = [
        (ours.get("".join(map(str, each["loc"])), "timezone"), each["msg"])
        for each in error.errors()
    ]
    return [
        f"{path}: retraining.schedule.{field}: {message.removeprefix('Value error, ')}"
        for field, message in found
    ]


def _ever_comes(schedule: CronSchedule) -> bool:
    """Whether it has a next time. Without one, the server's scheduler stumbles over it."""
    from prefect.server.schemas.schedules import CronSchedule as ServersSchedule

    same = ServersSchedule(cron=schedule.cron, timezone=schedule.timezone)
    try:
        return bool(asyncio.run(same.get_dates(1)))
    except ValueError:  # croniter's CroniterBadDateError
        return False


def described(schedule: Schedule) -> str:
    """A schedule, in words."""
    if isinstance(schedule, CronSchedule):
        return f"{schedule.cron}, {schedule.timezone}"
    return f"every {schedule.interval.total_seconds():g} s"


def rule_name(model: str) -> str:
    """The name of the automation that retrains a model when data arrives."""
    return f"trialflow: data arrived for {model}"


def data_arrived(model: str, deployment: UUID) -> AutomationCore:
    """The automation that retrains a model when data arrives."""
    # What is in the event is not rendered again: it came from outside.
    data: dict[str, Any] = {
        "__prefect_kind": "json",
        "value": {
            "__prefect_kind": "jinja",
            "template": "{{ event.payload.get('data', {}) | tojson }}",
        },
    }
    return AutomationCore(
        name=rule_name(model),
        description=f"The event {DATA_ARRIVED} of {resource_id(model)}, which `trialflow "
        f"data-arrived {model}` sends, retrains the model with the event's data.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={DATA_ARRIVED},
            match=ResourceSpecification({"prefect.resource.id": resource_id(model)}),
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment,
                parameters={"data": data},
                job_variables=None,
            )
        ],
    )


def arrival(model: str, data: Mapping[str, Any]) -> Event:
    """The event that data has arrived for a model."""
    about = {"prefect.resource.id": resource_id(model), "prefect.resource.name": model}
    return Event(event=DATA_ARRIVED, resource=Resource(about), payload={"data": dict(data)})
