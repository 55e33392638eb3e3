"""Resources of a model's retraining on a Prefect server: deployment, schedule and automation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore

from trialflow.deployments.desired_state import DeploymentTarget
from trialflow.deployments.file_schedule import FileSchedule
from trialflow.deployments.flow_deployment import FlowDeployment, deployment_named
from trialflow.deployments.resources import AutomationResource, Resource
from trialflow.deployments.retraining.retraining_requests import (
    FLOW,
    RetrainingRequest,
    automation_name,
    base_deployment,
    data_arrived_automation,
)

# Distinguishes the schedule of the experiment file from schedules that people created.
SLUG = "trialflow"


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
