"""The section `checkpointing`: how checkpoints are saved and read."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trial_core.config.section_base import Section
from trial_core.config.values import Flag, Seconds

_MAX_MEMORY_GIB = 2.0**20  # 1 PiB


class CheckpointingConfig(Section):
    """How checkpoints are saved and read."""

    yaml_path: ClassVar[str] = "checkpointing"

    memory_gib_per_rank: float | None = Field(
        default=None,
        ge=0,
        le=_MAX_MEMORY_GIB,
        allow_inf_nan=False,
        title="Memory for snapshots",
        description="GiB of host memory per rank for a snapshot that is being uploaded. Files that "
        "do not fit are staged on local disk; with 0, all files are. Default: the ranks of a "
        "machine share half of the memory that is free at their first snapshot; each takes what it "
        "needs.",
    )
    when_busy: Literal["wait", "postpone"] = Field(
        default="wait",
        title="While an upload is running",
        description="What happens when the next checkpoint is due. wait: training waits for the "
        "upload. postpone: training continues, and the checkpoint is saved as soon as the upload "
        "has ended. Only periodic checkpoints are postponed: the best and the last always wait.",
    )
    exclude_frozen_parameters: Flag = Field(
        default=False,
        title="Leave out frozen parameters",
        description="Whether checkpoints omit frozen weights; a resumed run uses the weights that "
        "the trial builds. Only for trials that do not override save.",
    )
    verify_first: Flag | None = Field(
        default=None,
        title="Verify the first checkpoint",
        description="Whether the ranks load the first checkpoint of a run as soon as it is staged, "
        "so that one that cannot be restored ends the run at once. null: if it is small (256 MiB a "
        "rank at most), and the trial does not override load. Not done by ranks on several "
        "machines, nor with a callback that has on_checkpoint_save_start or _load_start.",
    )
    stall_timeout_seconds: Seconds | None = Field(
        # A disk with much cached data may need minutes to write it, and shows no progress then.
        default=900.0,
        title="Stall timeout of transfers",
        description="Seconds without a byte moved after which a rank's upload or fetch counts as "
        "hung. It is killed and retried like a failed transfer. null: no limit.",
    )
    trusted: Flag = Field(
        default=False,
        title="Trusted checkpoints",
        description="Whether reading a checkpoint may create objects of any class, which can run "
        "code. By default only tensors, plain data and a few known classes are read.",
    )
