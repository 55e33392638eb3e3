"""The section `retraining` of an experiment: its model, its schedule, its promotion rule."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from trial_core.checkpoint.layout import is_name
from trial_core.config.error_text import format_value, validation_error
from trial_core.config.section_base import Section
from trial_core.config.values import Flag, Seconds, Text

Start = Literal["scratch", "warm", "continue"]


def _model(value: Any) -> Any:
    if isinstance(value, str) and value and not is_name(value):
        raise validation_error(
            "expected letters and digits, with dots, dashes and underscores between them, "
            f"got {format_value(value)}"
        )
    return value


def function_name(value: Any) -> Any:
    """Check the name of a function of the code folder."""
    module, colon, function = value.partition(":") if isinstance(value, str) else ("", "", "")
    parts = [*module.split("."), *function.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise validation_error(
            f'expected "module:function" of the code folder, got {format_value(value)}'
        )
    return value


class ScheduleConfig(Section):
    """When the deployment runs: at calendar times, or at an interval."""

    yaml_path: ClassVar[str] = "retraining.schedule"

    cron: Text | None = Field(
        default=None,
        description="Minute, hour, day of the month, month and day of the week.",
        examples=["0 3 * * *"],
    )
    timezone: Text | None = Field(
        default=None,
        title="Time zone",
        description="Time zone of `cron`, as an IANA name. Default: UTC.",
        examples=["Europe/Berlin"],
    )
    interval_seconds: Seconds | None = Field(
        default=None,
        title="Interval",
        description="Seconds from the start of one run to the start of the next.",
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Requires exactly one of cron and interval_seconds."""
        given = super().prepare(data)
        if ("cron" in given) == ("interval_seconds" in given):
            seen = "both" if "cron" in given else "neither"
            raise validation_error(f"expected either cron or interval_seconds, got {seen}")
        if "timezone" in given and "cron" not in given:
            raise validation_error("has no effect without cron", "timezone")
        return given


class RetrainingConfig(Section):
    """Settings of the flow `retrain`."""

    yaml_path: ClassVar[str] = "retraining"

    model: Annotated[str, BeforeValidator(_model)] = Field(
        default="",
        strict=True,
        description="The model's name in the registry. Default: the experiment's name, if it is "
        "of lower case letters, digits and dashes.",
    )
    start: Start = Field(
        default="scratch",
        description="What a challenger starts from: nothing (scratch), the champion's weights "
        "(warm), or its weights, optimizer, schedules and callbacks (continue). Batches always "
        "count from 0.",
    )
    search: Flag = Field(
        default=False,
        description="Whether the challenger is the best trial of a search: the experiment has "
        "ranges, and searcher.name is not single.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="A challenger is promoted if searcher.metric is better than the champion's by "
        "more than this.",
    )
    max_lateness_seconds: Seconds | None = Field(
        default=None,
        title="Longest delay",
        description="A run that starts later than this after its scheduled time is skipped. "
        "Default: no limit.",
    )
    callbacks: list[Annotated[str, BeforeValidator(function_name)]] = Field(
        default=[],
        description="Functions in the code folder, as module:function, that are called with the "
        "outcome. Each runs in a separate process.",
    )
    callback_timeout_seconds: Seconds | None = Field(
        default=600.0,
        title="Callback timeout",
        description="A callback that takes longer is killed and counts as failed. Null: no limit.",
    )
    schedule: ScheduleConfig | None = Field(
        default=None,
        title="Schedule",
        description="When the deployment runs. Default: only when started by hand.",
    )
    on_data_arrived: Flag = Field(
        default=False,
        title="Run when data arrives",
        description="Whether `trialflow data-arrived` starts a run of the deployment.",
    )
