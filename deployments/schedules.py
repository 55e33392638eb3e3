"""Schedules of deployments: their times, checked by Prefect's scheduler, and what files ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from pydantic import ValidationError

from trial_core.errors import ConfigError
from trialflow.deployments.flow_deployment import deployment_named
from trialflow.deployments.resources import Resource

RunSchedule = CronSchedule | IntervalSchedule

# Intervals count from here, so a schedule has the same times whenever it is deployed.
ANCHOR = "2020-01-01T00:00:00Z"


def interval_schedule(seconds: float, zone: str, source: str) -> IntervalSchedule:
    """A schedule with equal pauses. Raises as `cron_schedule`."""
    try:
        return IntervalSchedule(
            interval=timedelta(seconds=seconds), anchor_date=ANCHOR, timezone=zone
        )
    except ValidationError as error:
        raise ConfigError("\n".join(_error_lines(source, error))) from None


def cron_schedule(cron: str, zone: str, source: str) -> CronSchedule:
    """The schedule of a cron line.

    Args:
        zone: such as ``Europe/Berlin``.
        source: where the schedule is written; an error begins with it and the field's name.

    Raises:
        ConfigError: Prefect does not accept the schedule, or it has no future time.
    """
    try:
        schedule = CronSchedule(cron=cron, timezone=zone)
    except ValidationError as error:
        raise ConfigError("\n".join(_error_lines(source, error))) from None
    from prefect.server.schemas.schedules import CronSchedule as ServerCronSchedule

    server_schedule = ServerCronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    with suppress(ValueError):  # croniter's CroniterBadDateError, with which the scheduler fails
        if asyncio.run(server_schedule.get_dates(1)):
            return schedule
    raise ConfigError(f"{source}cron: {schedule.cron!r} has no future time: no such day exists")


def describe(schedule: RunSchedule) -> str:
    """``0 3 * * *, UTC`` or ``every 90 s``."""
    if isinstance(schedule, CronSchedule):
        return f"{schedule.cron}, {schedule.timezone}"
    return f"every {schedule.interval.total_seconds():g} s"


def _error_lines(source: str, error: ValidationError) -> list[str]:
    """Prefect's validation errors under the names of our fields."""
    fields = {"cron": "cron", "interval": "interval_seconds"}
    lines = []
    for each in error.errors():
        field = fields.get("".join(map(str, each["loc"])), "timezone")
        message = each["msg"].removeprefix("Value error, ")
        lines.append(f"{source}{field}: {message}")
    return lines


class FileSchedule(Resource):
    """A schedule of a deployment that an experiment file asks for, or the command that names it.

    Leaves the deployment's other schedules alone, and does not activate or pause this one, because
    people do.

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
        _, found = self._read(client)
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
        deployment, found = self._read(client)
        if deployment is None or self._schedule is None:
            return
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
        deployment, found = self._read(client)
        if deployment is not None and found is not None:
            client.delete_deployment_schedule(deployment.id, found.id)

    def _read(
        self, client: SyncPrefectClient
    ) -> tuple[DeploymentResponse | None, DeploymentSchedule | None]:
        deployment = deployment_named(client, self._deployment)
        schedules = deployment.schedules if deployment is not None else []
        return deployment, next((each for each in schedules if each.slug == self._slug), None)
