"""The section `cost`: what a run's slots cost."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trial_core.config.section_base import Section


class CostConfig(Section):
    """What a run's slots cost."""

    yaml_path: ClassVar[str] = "cost"

    per_slot_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        title="Price of a slot",
        description="Price of one slot for an hour, in any currency. The ledger of time then tells "
        "what the trial has cost.",
    )
