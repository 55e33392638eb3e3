"""Resources of a model's retraining on a Prefect server: deployment, schedule and automation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.events.schemas.automations import AutomationCore

from trialflow.deployments.desired_state import DeploymentTarget
from trialflow.deployments.flow_deployment import FlowDeployment, deployment_of
from trialflow.deployments.resources import AutomationResource, Resource
from trialflow.deployments.retraining.retraining_requests import (
    FLOW,
    RetrainingRequest,
    RetrainingSchedule,
    automation_name,
    base_deployment,
    data_arrived_automation,
    describe_schedule,
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
            yield FileSchedule(each.model, each.schedule)
        if each.on_data_arrived:
            yield _data_arrived(each.model)


def unrequested_resources(requests: Iterable[RetrainingRequest]) -> Iterator[Resource]:
    """The resources that experiment files do not request, and may have requested earlier."""
    for each in requests:
        if each.schedule is None:
            yield FileSchedule(each.model, None)
        if not each.on_data_arrived:
            yield _data_arrived(each.model)


def all_resources(models: Iterable[str]) -> Iterator[Resource]:
    """All resources of models, for removal. Schedules are removed with their deployments."""
    for model in models:
        yield FlowDeployment(base_deployment(model), DeploymentTarget("", None))
        yield _data_arrived(model)


class FileSchedule(Resource):
    """The schedule in a model's experiment file. Leaves other schedules of the deployment alone.

    It does not activate or pause the schedule, because people do.

    Args:
        schedule: the schedule, or None to remove any.
    """

    def __init__(self, model: str, schedule: RetrainingSchedule | None) -> None:
        when = f" ({describe_schedule(schedule)})" if schedule is not None else ""
        self.title = f"schedule of {FLOW}/{model}{when}"
        self._model = model
        self._schedule = schedule

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self._read(client)
        if found is None:
            return False, ""
        is_same = self._schedule is None or found.schedule == self._schedule
        return True, "" if is_same else "other times"

    def put(self, client: SyncPrefectClient) -> None:
        deployment = deployment_of(client, self._model)
        if deployment is None or self._schedule is None:
            return
        found = self._read(client)
        if found is not None:
            client.update_deployment_schedule(deployment.id, found.id, schedule=self._schedule)
        else:
            wanted = DeploymentScheduleCreate(schedule=self._schedule, slug=SLUG)
            client.create_deployment_schedules(deployment.id, [wanted])

    def remove(self, client: SyncPrefectClient) -> None:
        deployment, found = deployment_of(client, self._model), self._read(client)
        if deployment is not None and found is not None:
            client.delete_deployment_schedule(deployment.id, found.id)

    def _read(self, client: SyncPrefectClient) -> DeploymentSchedule | None:
        deployment = deployment_of(client, self._model)
        schedules = deployment.schedules if deployment is not None else []
        return next((each for each in schedules if each.slug == SLUG), None)


def _data_arrived(model: str) -> AutomationResource:
    def wanted(client: SyncPrefectClient) -> AutomationCore | None:
        deployment = deployment_of(client, model)
        return None if deployment is None else data_arrived_automation(model, deployment.id)

    return AutomationResource(automation_name(model), wanted)
