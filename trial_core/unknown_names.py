"""The errors for names of Determined that do not exist here: they say what to use."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_CONTEXT = "DeepSpeedTrialContext"

_INSTEAD = {
    "trial_core": {
        "ClusterInfo": "trial_core.get_cluster_info()",
        "TrialContext": "trial_core.deepspeed.DeepSpeedTrialContext, or that of trial_core.pytorch",
        "InvalidHP": "trial_core.errors.TrialError",
        "keras": "trial_core.pytorch; only PyTorch and DeepSpeed trials exist",
        "launch": "what it starts: trialflow runs the script once in each slot",
    },
    "trial_core.pytorch": {
        "CheckpointLoadContext": "trial_core.pytorch.PyTorchTrialContext.from_config",
        "ClipGradsL2Norm": "context.step_optimizer(optimizer, clip_grads=...)",
        "ClipGradsL2Value": "context.step_optimizer(optimizer, clip_grads=...)",
        "lightning": "trial_core.pytorch.PyTorchTrial",
        "dsat": "DeepSpeed's own autotuner",
    },
    "trial_core.deepspeed": {
        "dsat": "DeepSpeed's own autotuner",
        "PyTorchTrial": "trial_core.pytorch.PyTorchTrial",
        "DataLoader": "trial_core.pytorch.DataLoader",
    },
    "Context": {
        "profiler": "torch.profiler, with context.train.get_tensorboard_path()",
        "metrics": "context.train",
        "experimental": "the script's own loop",
    },
    "TrainContext": {
        "report_metrics": "report_training_metrics or report_validation_metrics",
        "report_progress": "searcher.max_length in batches: the report shows it",
        "report_early_exit": "the script's end",
        "upload_tensorboard_files": "get_tensorboard_path(): its files are always stored",
    },
    _CONTEXT: {
        "wrap_mpu": "set_mpu",
        "wrap_model": "wrap_model_engine, with the engine of deepspeed.initialize",
        "wrap_optimizer": "deepspeed.initialize(optimizer=...): the engine has it",
        "wrap_lr_scheduler": "deepspeed.initialize(lr_scheduler=...): the engine has it",
        "wrap_scaler": "fp16 in DeepSpeed's config",
        "configure_apex_amp": "fp16 or bf16 in DeepSpeed's config",
        "experimental": "the methods of the context itself",
        "backward": "engine.backward(loss)",
        "step_optimizer": "engine.step()",
        "env": "get_experiment_config(), get_hparams() and get_trial_seed()",
        "profiler": "set_profiler",
    },
}


def unknown_name(of: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for a `name` that a module or class does not have.

    Args:
        of: the module's or the class's name.
        known: the names that it has.
    """
    instead = _INSTEAD.get(of, {}).get(name)
    if instead is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    else:
        hint = f"; use {instead}"
    kind = f"module {of!r}" if of.startswith("trial_core") else f"{of!r} object"
    return AttributeError(f"{kind} has no attribute {name!r}{hint}", name=name)
