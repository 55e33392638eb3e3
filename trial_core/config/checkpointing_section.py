"""How checkpoints are taken and read, as far as a run can choose."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trial_core.config.base import Section
from trial_core.config.values import Flag

STALL_TIMEOUT_SECONDS = 900.0
"""The default stall timeout of transfers. A sync of much cached data to disk may take minutes in
which no bytes are counted. Three attempts of a rank take less than the other ranks wait for it, so
the others receive its error."""


class CheckpointingConfig(Section):
    """How checkpoints are taken and read."""

    at: ClassVar[str] = "checkpointing"

    memory_gib_per_rank: float | None = Field(
        default=None,
        ge=0,
        title="Memory for snapshots",
        description="GiB of host memory that a rank may hold a snapshot in while it is uploaded; "
        "what does not fit, and everything with 0, is staged on local disk. Default: half of what "
        "is free on the machine, divided among its ranks.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        title="When an upload is still under way",
        description="Whether the next checkpoint waits for it, or is skipped where it is only "
        "periodic; the best and the last ones always wait.",
    )
    exclude_frozen_parameters: Flag = Field(
        default=False,
        title="Leave out frozen parameters",
        description="Whether weights that are not trained are left out of checkpoints; a run that "
        "resumes has those that the trial builds. For trials that do not override save.",
    )
    stall_timeout_seconds: float | None = Field(
        default=STALL_TIMEOUT_SECONDS,
        gt=0,
        title="Stall timeout of transfers",
        description="Seconds without any byte moved after which a rank's upload or fetch counts as "
        "hung: it is ended, and tried again as where the storage fails. null: it may hang for "
        "ever.",
    )
    trusted: Flag = Field(
        default=False,
        title="Trusted checkpoints",
        description="Whether reading a checkpoint may construct objects of any class, which can "
        "run code. By default only tensors, plain data and a few known classes are read.",
    )
