"""Times at which a deployment runs, in Prefect's types and checked by its scheduler's code."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from pydantic import ValidationError

from trial_core.errors import ConfigError

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
