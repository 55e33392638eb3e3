"""A model's weights alone, out of a checkpoint that DeepSpeed has written."""

from __future__ import annotations

from pathlib import Path

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from trial_core.errors import TrialError


def load_weights(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load an engine's weights alone; optimizer and schedule stay as they are.

    The checkpoint may be from another number of data-parallel ranks. Under ZeRO-3 every rank has
    the whole model in host memory for a moment. Collective: every rank calls this.

    Raises:
        TrialError: DeepSpeed found no weights of that tag.
    """
    if not (folder / tag).is_dir():
        raise TrialError(
            f'DeepSpeed found no weights (tag "{tag}") in {folder}; a trial that overrides save '
            "defines load_weights as well"
        )
    if not engine.zero_optimization_partition_weights():
        engine.load_checkpoint(
            str(folder),
            tag=tag,
            load_module_only=True,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
        )
        return
    # DeepSpeed's own way looks for a shard of each present rank, and for the tag saved last.
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)
    engine.optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(checkpoint={"module": weights}, fetch_z3_params=True)
    engine.optimizer._restore_from_bit16_weights()
    engine.optimizer.checkpoint_event_epilogue()
