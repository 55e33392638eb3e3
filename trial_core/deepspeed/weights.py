"""A model's weights alone, out of a checkpoint that DeepSpeed has written."""

from __future__ import annotations

from pathlib import Path

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from trial_core.deepspeed.export import export_weights
from trial_core.errors import TrialError


def load_weights(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load an engine's weights alone; optimizer and schedule stay as they are.

    The checkpoint may be from another number of data-parallel ranks or another ZeRO stage. Under
    ZeRO-3 every rank has the whole model in host memory for a moment. Collective: every rank calls
    this.

    Raises:
        TrialError: DeepSpeed found no weights of that tag.
    """
    if not (folder / tag).is_dir():
        raise TrialError(
            f'DeepSpeed found no weights (tag "{tag}") in {folder}; a trial that overrides save '
            "defines load_weights as well"
        )
    into_parts = engine.zero_optimization_partition_weights()
    from_parts = any((folder / tag).glob("zero_pp_rank_*_model_states.pt"))
    if not into_parts and not from_parts:
        path, _ = engine.load_checkpoint(
            str(folder),
            tag=tag,
            load_module_only=True,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
        )
        if path is None:
            raise TrialError(f'DeepSpeed found no checkpoint (tag "{tag}") in {folder}')
        return
    # DeepSpeed's own way looks for a shard of each present rank, and for the tag saved last.
    if from_parts and into_parts:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)
    else:
        weights = export_weights(folder, int(tag.removeprefix("model")))
    if not into_parts:
        engine.load_module_state_dict(checkpoint={"module": weights})
        if hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        return
    engine.optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(checkpoint={"module": weights}, fetch_z3_params=True)
    engine.optimizer._restore_from_bit16_weights()
    engine.optimizer.checkpoint_event_epilogue()
