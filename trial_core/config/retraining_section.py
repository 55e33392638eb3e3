"""How an experiment is trained again and again: what becomes of its model, and when."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from trial_core.checkpoint.layout import is_name
from trial_core.config.base import Section
from trial_core.config.error_text import format_value, validation_error
from trial_core.config.values import Flag, Text

Start = Literal["scratch", "warm", "continue"]

# Prefect computes the next times of a schedule ahead, and dates have an end.
_TEN_YEARS_SECONDS = 10 * 365 * 86400


def _model(value: Any) -> Any:
    if isinstance(value, str) and value and not is_name(value):
        raise validation_error(
            "expected letters, digits, and within them dots, dashes and underscores, "
            f"got {format_value(value)}"
        )
    return value


def _callback(value: Any) -> Any:
    module, colon, function = value.partition(":") if isinstance(value, str) else ("", "", "")
    parts = [*module.split("."), *function.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise validation_error(
            f'expected "module:function" of the code folder, got {format_value(value)}'
        )
    return value


class ScheduleConfig(Section):
    """When a deployment of the experiment is to run: by a calendar, or every so often."""

    yaml_path: ClassVar[str] = "retraining.schedule"

    cron: Text | None = Field(
        default=None,
        title="Cron",
        description="Minute, hour, day of the month, month and day of the week.",
        examples=["0 3 * * *"],
    )
    timezone: Text | None = Field(
        default=None,
        title="Time zone",
        description="Of `cron`, as the IANA database calls it. Default: UTC.",
        examples=["Europe/Berlin"],
    )
    interval_seconds: float | None = Field(
        default=None,
        gt=0,
        le=_TEN_YEARS_SECONDS,
        allow_inf_nan=False,
        title="Interval",
        description="Seconds from the beginning of one run to that of the next.",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Refuses two ways of saying when, and none."""
        given = super().prepare(data)
        if ("cron" in given) == ("interval_seconds" in given):
            seen = "both" if "cron" in given else "neither"
            raise validation_error(f"expected either cron or interval_seconds, got {seen}")
        if "timezone" in given and "cron" not in given:
            raise validation_error("has no effect without cron", "timezone")
        return given


class RetrainingConfig(Section):
    """What the flow `retrain` does with the experiment."""

    yaml_path: ClassVar[str] = "retraining"

    model: Annotated[str, BeforeValidator(_model)] = Field(
        default="",
        strict=True,
        title="Model",
        description="Its name in the registry. Default: the experiment's, in lower case with "
        "dashes.",
    )
    start: Start = Field(
        default="scratch",
        title="Start",
        description="What a challenger starts from: nothing (scratch), the champion's weights "
        "(warm), or its weights, optimizer, schedules and callbacks (continue). Batches count "
        "from 0 in any case.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        title="Margin",
        description="In the unit of searcher.metric: a challenger takes the champion's place if "
        "it is better by more than this.",
    )
    max_lateness_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Longest delay",
        description="A run that begins later than this after its scheduled time is skipped. "
        "Default: none is.",
    )
    callbacks: list[Annotated[str, BeforeValidator(_callback)]] = Field(
        default=[],
        title="Callbacks",
        description="Functions of the code folder, as module:function, that are called with the "
        "outcome, each in a process of its own.",
    )
    callback_timeout_seconds: float | None = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        title="Callbacks' timeout",
        description="A callback that takes longer is ended, and counts as failed. Null: none is.",
    )
    schedule: ScheduleConfig | None = Field(
        default=None,
        title="Schedule",
        description="When its deployment runs. Default: when somebody starts it.",
    )
    on_data_arrived: Flag = Field(
        default=False,
        title="Run when data arrives",
        description="Whether `trialflow data-arrived` starts a run of its deployment.",
    )
