"""The section `stopping`: when a run stops by itself, and how long it may take."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trial_core.config.section_base import Section
from trial_core.config.values import MAX_SECONDS, Flag, Seconds

MIN_IDLE_TIMEOUT_SECONDS = 1800.0


class StoppingConfig(Section):
    """When a run stops by itself, and how long it may take."""

    yaml_path: ClassVar[str] = "stopping"

    grace_seconds: float = Field(
        default=25.0,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        title="Grace period",
        description="Seconds that a run may take to save after Cancel, SIGTERM or Ctrl-C; then its "
        "ranks are killed. Prefect's workers kill after 30.",
    )
    time_budget_seconds: Seconds | None = Field(
        default=None,
        title="Time budget",
        description="Seconds after which a run saves and ends; resume it later. Default: no limit.",
    )
    stall_timeout_seconds: Seconds | None = Field(
        default=1800.0,
        title="Stall timeout",
        description="Seconds without a trained or validated batch after which the ranks count as "
        "hung: their stacks are logged, and they are restarted. Stages without batches (building, "
        "fetching, saving, callbacks) count as hung after as long, and at least half an hour, "
        "without a write to a log or disk. An evaluate_full_dataset counts as one batch. null: no "
        "limit.",
    )

    fail_on_non_finite_loss: Flag = Field(
        default=True,
        title="Fail if the loss is not finite",
        description="Whether a run ends as failed whose training loss is NaN or infinite in all "
        "batches of a train-workload, and in at least 5. From the first such batch on, no "
        "checkpoint is stored, so that the last one is from before it. false: such a run trains "
        "on. Metrics that are not finite are warned of in any case.",
    )

    server_outage_seconds: Seconds | None = Field(
        default=3600.0,
        title="Server outage",
        description="Seconds without an answer of the Prefect server after which a run saves and "
        "ends. Until then it trains, and reports later what it could not report. null: no limit.",
    )

    @property
    def idle_timeout_seconds(self) -> float | None:
        """How long ranks may write nothing in a stage without batches; None for no limit.

        At least half an hour: the timeout is chosen by the length of a batch, which says nothing
        about a build that downloads, or a callback.
        """
        stall = self.stall_timeout_seconds
        return None if stall is None else max(stall, MIN_IDLE_TIMEOUT_SECONDS)
