"""Schedules of deployments that an experiment file asks for, or the command that names the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule

from trialflow.deployments.flow_deployment import deployment_named
from trialflow.deployments.resources import Resource
from trialflow.deployments.schedules import RunSchedule, describe


class FileSchedule(Resource):
    """A schedule of a deployment. Leaves other schedules of the deployment alone.

    It does not activate or pause the schedule, because people do.

    Args:
        deployment: its name, such as ``train/train``.
        slug: distinguishes the schedule from the deployment's others.
        schedule: the schedule, or None to remove any.
        parameters: of its runs, in place of the deployment's. None leaves them to people.
    """

    def __init__(
        self, deployment: str, slug: str, schedule: RunSchedule | None,
        parameters: Mapping[str, Any] | None = None, of: str = "",
    ) -> None:  # fmt: skip
        details = ", ".join(filter(None, (of, describe(schedule) if schedule else "")))
        self.title = f"schedule of {deployment}{f' ({details})' if details else ''}"
        self._deployment = deployment
        self._slug = slug
        self._schedule = schedule
        self._parameters = None if parameters is None else dict(parameters)

    def look(self, client: SyncPrefectClient) -> tuple[bool, str]:
        found = self._read(client)
        if found is None:
            return False, ""
        if self._schedule is None:
            return True, ""
        differs = {
            "other times": found.schedule != self._schedule,
            "another experiment": self._parameters not in (None, found.parameters),
        }
        return True, ", ".join(name for name, is_so in differs.items() if is_so)

    def put(self, client: SyncPrefectClient) -> None:
        deployment = deployment_named(client, self._deployment)
        if deployment is None or self._schedule is None:
            return
        found = self._read(client)
        if found is not None:
            # The server empties parameters that an update does not have.
            kept = found.parameters if self._parameters is None else self._parameters
            client.update_deployment_schedule(
                deployment.id, found.id, schedule=self._schedule, parameters=kept
            )
            return
        wanted = DeploymentScheduleCreate(
            schedule=self._schedule, slug=self._slug, parameters=self._parameters or {}
        )
        client.create_deployment_schedules(deployment.id, [wanted])

    def remove(self, client: SyncPrefectClient) -> None:
        deployment = deployment_named(client, self._deployment)
        found = self._read(client)
        if deployment is not None and found is not None:
            client.delete_deployment_schedule(deployment.id, found.id)

    def _read(self, client: SyncPrefectClient) -> DeploymentSchedule | None:
        deployment = deployment_named(client, self._deployment)
        schedules = deployment.schedules if deployment is not None else []
        return next((each for each in schedules if each.slug == self._slug), None)
