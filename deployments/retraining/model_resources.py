"""What a Prefect server has of a model's retraining, besides its deployment, as `Resource`s: the
schedule that its file gives, and the automation that runs it when data arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.events.schemas.automations import AutomationCore

from trialflow.deployments.desired_state import DeploymentTarget
from trialflow.deployments.flow_deployment import FlowDeployment, deployment_of
from trialflow.deployments.resources import AutomationResource, Resource
from trialflow.deployments.retraining.requests import (
    FLOW,
    RetrainingRequest,
    Schedule,
    data_arrived,
    described,
    rule_name,
    template,
)

# What tells the schedule that the file gives from those that people have made.
SLUG = "trialflow"


def asked_for(
    retrainings: Iterable[RetrainingRequest], place: DeploymentTarget
) -> Iterator[Resource]:
    """What files ask for."""
    for each in retrainings:
        yield FlowDeployment(each.deployment, place)
        if each.schedule is not None:
            yield FileSchedule(each.model, each.schedule)
        if each.on_data_arrived:
            yield DataArrivedRule(each.model)


def not_asked_for(retrainings: Iterable[RetrainingRequest]) -> Iterator[Resource]:
    """What files do not ask for, and may have asked for before."""
    for each in retrainings:
        if each.schedule is None:
            yield FileSchedule(each.model, None)
        if not each.on_data_arrived:
            yield DataArrivedRule(each.model)


def all_of(models: Iterable[str]) -> Iterator[Resource]:
    """All that there can be of models, to be removed. Schedules go with their deployments."""
    for model in models:
        yield FlowDeployment(template(model), DeploymentTarget("", None))
        yield DataArrivedRule(model)


class FileSchedule(Resource):
    """The schedule that a model's file gives; others of its deployment are people's.

    Whether it is active is people's as well.

    Args:
        schedule: None: whatever it is, for removing it.
    """

    def __init__(self, model: str, schedule: Schedule | None) -> None:
        when = f" ({described(schedule)})" if schedule is not None else ""
        self.title = f"schedule of {FLOW}/{model}{when}"
        self._model = model
        self._schedule = schedule

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self._read(client)
        if found is None:
            return False, ""
        is_same = self._schedule is None or found.schedule == self._schedule
        return True, "" if is_same else "another time"

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


class DataArrivedRule(AutomationResource):
    """The automation that runs a model's retraining when data arrives."""

    def __init__(self, model: str) -> None:
        super().__init__(rule_name(model))
        self._model = model

    def wanted(self, client: SyncPrefectClient) -> AutomationCore | None:
        """The automation; None while there is no deployment for it to run."""
        deployment = deployment_of(client, self._model)
        return data_arrived(self._model, deployment.id) if deployment is not None else None
