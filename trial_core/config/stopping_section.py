"""When a run stops by itself, and how long it may take to."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trial_core.config.base import Section

SHORTEST_SILENCE_SECONDS = 1800.0


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
        "hung: their stacks are logged, and they are started again. Where no batches are due "
        "(building, fetching, saving, callbacks) it is so long, and half an hour at least, "
        "without anything that they write to logs or disks. null: they may take for ever. An "
        "evaluate_full_dataset counts as one batch.",
    )

    @property
    def idle_timeout_seconds(self) -> float | None:
        """How long ranks may write nothing where no batches are due; None: for ever.

        Never less than half an hour: who knows how long batches take does not know that of a
        build that downloads, or of callbacks.
        """
        stall = self.stall_timeout_seconds
        return None if stall is None else max(stall, SHORTEST_SILENCE_SECONDS)
