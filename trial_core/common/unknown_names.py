"""Errors for Determined's names that do not exist here; each says which name to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

_CLUSTER = "nothing: there is no Determined cluster"
_STORED = "metadata of store_path: a checkpoint never changes"

_INSTEAD = {
    "trial_core": {
        "TrialContext": "trial_core.deepspeed.DeepSpeedTrialContext, or that of trial_core.pytorch",
        "keras": "trial_core.pytorch; only PyTorch and DeepSpeed trials exist",
        "lightning": "trial_core.init in a Lightning callback",
        "launch": "what it starts: trialflow runs the script once in each slot",
    },
    "trial_core.pytorch": {
        "CheckpointLoadContext": "trial_core.pytorch.PyTorchTrialContext.from_config",
        "ClipGradsL2Norm": "context.step_optimizer(optimizer, clip_grads=...)",
        "ClipGradsL2Value": "context.step_optimizer(optimizer, clip_grads=...)",
        "lightning": "trial_core.pytorch.PyTorchTrial",
    },
    "trial_core.deepspeed.dsat": {
        "autotune": "DeepSpeed's own autotuner",
    },
    "trial_core.deepspeed": {
        "PyTorchTrial": "trial_core.pytorch.PyTorchTrial",
        "DataLoader": "trial_core.pytorch.DataLoader",
    },
    "trial_core.experimental.core_v2": {
        "url_reverse_webui_exp_view": "the report in the run's folder: there is no web UI",
    },
    "trial_core.experimental.client": {
        "create_experiment": "trialflow train",
        "create_model": "trialflow models promote",
        "get_models": "list_models",
        "iter_trials_metrics": "Trial.iter_metrics",
    },
    "ClusterInfo": {
        "agent_id": "socket.gethostname()",
        "gpu_uuids": "CUDA_VISIBLE_DEVICES in os.environ",
        "task_id": "trial.trial_id",
        **dict.fromkeys(("cluster_id", "allocation_id", "session_token"), _CLUSTER),
        **dict.fromkeys(("master_url", "master_cert_file", "master_cert_name"), _CLUSTER),
    },
    "Context": {
        "metrics": "context.train",
        "experimental": "the hyperparameters, for the checkpoint that a script uses",
        **dict.fromkeys(("start", "close"), "a block: with trial_core.init() as context"),
    },
    "TrainContext": dict.fromkeys(("set_metadata", "get_metadata"), _STORED),
    "StoredCheckpoint": {
        "add_metadata": _STORED,
        "reload": "client.get_checkpoint",
        "load": "trial_core.pytorch.load_trial_from_checkpoint_path(checkpoint.download())",
    },
    "Trial": {
        "get_checkpoints": "list_checkpoints",
        "select_checkpoint": "top_checkpoint or list_checkpoints",
        "logs": "the files of the run",
    },
    "Model": {"get_versions": "list_versions", "register_version": "trialflow models promote"},
    "ModelVersion": {"iter_metrics": "checkpoint.get_metrics"},
    "DeepSpeedTrialContext": {
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
    """The error for a `name` that a module or class does not have; it has the `known` ones."""
    instead = _INSTEAD.get(of, {}).get(name)
    if instead is None:
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    else:
        hint = f"; use {instead}"
    kind = f"module {of!r}" if of.startswith("trial_core") else f"{of!r} object"
    return AttributeError(f"{kind} has no attribute {name!r}{hint}", name=name)


class SaysWhatToUse:
    """Base of classes that follow a class of Determined: the error for a missing name says more."""

    def __getattr__(self, name: str) -> NoReturn:
        kinds = [kind.__name__ for kind in type(self).__mro__]
        of = next((kind for kind in kinds if kind in _INSTEAD), kinds[0])
        raise unknown_name(of, name, [*dir(type(self)), *vars(self)])
