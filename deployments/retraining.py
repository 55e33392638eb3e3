"""What experiments' `retraining` sections request of a Prefect server, and its resources there.

Each section requests a deployment of the flow `retrain`, and may request a schedule and an
automation that runs it when data arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from trial_core.errors import ConfigError
from trial_core.models.data_templates import render_data
from trialflow.deployments.desired_state import (
    RETRAIN_ENTRYPOINT,
    DeploymentTarget,
    DesiredDeployment,
    base_deployment,
    deployments,
)
from trialflow.deployments.flow_deployment import FlowDeployment, deployment_named
from trialflow.deployments.resources import AutomationResource, Resource
from trialflow.deployments.schedules import (
    FileSchedule,
    RunSchedule,
    cron_schedule,
    interval_schedule,
)
from trialflow.tasks.events import DATA_ARRIVED, resource_id

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig, RetrainingConfig

FLOW = "retrain"
# Distinguishes the schedule of the experiment file from schedules that people created.
SLUG = "trialflow"


@dataclass(frozen=True)
class RetrainingRequest:
    """The requests of one experiment's `retraining` section.

    Attributes:
        deployment: the deployment; its parameter is the experiment.
        schedule: when it runs, or None if only when it is started.
        on_data_arrived: True if it also runs when data arrives.
    """

    model: str
    deployment: DesiredDeployment
    schedule: RunSchedule | None
    on_data_arrived: bool


def retraining_requests(experiments: Mapping[Path, ExperimentConfig]) -> list[RetrainingRequest]:
    """Return the requests of experiment files.

    Raises:
        ConfigError: a file has no `retraining` section, an impossible schedule, a template that
            cannot be rendered, or a model name that is taken.
    """
    found: dict[str, tuple[Path, RetrainingRequest]] = {}
    for path, config in experiments.items():
        request = _request(path, config)
        other, _ = found.setdefault(request.model, (path, request))
        if other != path:
            raise ConfigError(
                f"{path}: retraining.model: {request.model!r} is also the model of {other}, and a "
                "model has one deployment: choose another name in one of the files"
            )
    return [request for _, request in found.values()]


def _request(path: Path, config: ExperimentConfig) -> RetrainingRequest:
    section = config.retraining
    if section is None:
        raise ConfigError(
            f"{path}: there is no `retraining` section, which says what this command deploys; the "
            "shortest one is `retraining: {}`. To train once: leave the file out here, then "
            f"`trialflow start {path}`; on a schedule: `trialflow deploy {path} --schedule "
            '"0 2 * * *"`'
        )
    general = [each.name for each in deployments() if each.entrypoint == RETRAIN_ENTRYPOINT]
    if section.model in general:
        raise ConfigError(
            f"{path}: retraining.model: {section.model!r} is the name of the deployment that "
            "retrains any model: choose another name"
        )
    try:
        render_data(config.data, datetime.now(timezone.utc))
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None
    return RetrainingRequest(
        model=section.model,
        deployment=replace(
            base_deployment(section.model), from_file={"config": config.model_dump(mode="json")}
        ),
        schedule=schedule_of(path, section),
        on_data_arrived=section.on_data_arrived,
    )


def schedule_of(path: Path, section: RetrainingConfig) -> RunSchedule | None:
    """Return the schedule of a `retraining` section, as Prefect's type.

    Raises:
        ConfigError: Prefect does not accept the schedule, or it has no future time.
    """
    if section.schedule is None:
        return None
    zone, source = section.schedule.timezone or "UTC", f"{path}: retraining.schedule."
    if section.schedule.cron is None:
        return interval_schedule(section.schedule.interval_seconds or 0, zone, source)
    return cron_schedule(section.schedule.cron, zone, source)


def automation_name(model: str) -> str:
    return f"trialflow: data arrived for {model}"


def data_arrived_automation(model: str, deployment: UUID) -> AutomationCore:
    """The automation that retrains a model when data arrives."""
    # A JSON value, not a template: text in the event comes from outside and is never rendered.
    data: dict[str, Any] = {
        "__prefect_kind": "json",
        "value": {
            "__prefect_kind": "jinja",
            "template": "{{ event.payload.get('data', {}) | tojson }}",
        },
    }
    return AutomationCore(
        name=automation_name(model),
        description=f"Retrains the model with the data of each event {DATA_ARRIVED} of "
        f"{resource_id(model)}, which `trialflow data-arrived {model}` sends.",
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


def requested_resources(
    requests: Iterable[RetrainingRequest], target: DeploymentTarget
) -> Iterator[Resource]:
    """The resources that experiment files request."""
    for each in requests:
        yield FlowDeployment(each.deployment, target)
        if each.schedule is not None:
            yield FileSchedule(f"{FLOW}/{each.model}", SLUG, each.schedule)
        if each.on_data_arrived:
            yield _data_arrived(each.model)


def unrequested_resources(requests: Iterable[RetrainingRequest]) -> Iterator[Resource]:
    """The resources that experiment files do not request, and may have requested earlier."""
    for each in requests:
        if each.schedule is None:
            yield FileSchedule(f"{FLOW}/{each.model}", SLUG, None)
        if not each.on_data_arrived:
            yield _data_arrived(each.model)


def all_resources(models: Iterable[str]) -> Iterator[Resource]:
    """All resources of models, for removal. Schedules are removed with their deployments."""
    for model in models:
        yield FlowDeployment(base_deployment(model), DeploymentTarget("", None))
        yield _data_arrived(model)


def _data_arrived(model: str) -> AutomationResource:
    def wanted(client: SyncPrefectClient) -> AutomationCore | None:
        deployment = deployment_named(client, f"{FLOW}/{model}")
        return None if deployment is None else data_arrived_automation(model, deployment.id)

    return AutomationResource(automation_name(model), wanted)
