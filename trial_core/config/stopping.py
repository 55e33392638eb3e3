"""When a run stops by itself, and how long it may take to."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trial_core.config.base import Section


class StoppingConfig(Section):
    """When a run stops by itself, and how long it may take to."""

    at: ClassVar[str] = "stopping"

    grace_seconds: float = Field(
        default=25.0,
        ge=0,
        title="Grace",
        description="How long a run that is asked to stop (Cancel, SIGTERM, Ctrl-C) may take to "
        "save; then its ranks are ended as they are. Prefect's workers kill after 30.",
    )
    time_budget_seconds: float | None = Field(
        default=None,
        gt=0,
        title="Time budget",
        description="Seconds after which a run saves and ends, to be resumed. Default: no limit.",
    )
    stall_timeout_seconds: float | None = Field(
        default=1800.0,
        gt=0,
        title="Stall timeout",
        description="Seconds without a trained or validated batch after which the ranks count as "
        "hung: their stacks are logged, and they are started again. null: they may take for ever. "
        "An evaluate_full_dataset counts as one batch.",
    )
