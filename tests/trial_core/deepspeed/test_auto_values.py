"""``"auto"`` in a DeepSpeedTrial's config is a hyperparameter's value, or is refused by its key."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from tests.support.slots import drive, toy_config
from tests.support.tensors import differing, tensors
from trial_core.config import ExperimentConfig
from trial_core.deepspeed.auto_values import fill_auto_values, filled
from trial_core.errors import RankFailed, TrialError
from trial_core.processes.slots.slot_group import SlotGroup

Warm = Callable[[int], SlotGroup]
GIVEN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.125, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
}  # fmt: skip
AUTO: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}  # fmt: skip
"""As in Hugging Face's documentation."""
HPARAMS = {
    "global_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.125,
    "bf16": True, "learning_rate": 0.02, "betas": [0.8, 0.9], "warmup_num_steps": 4,
}  # fmt: skip


def own_config(folder: Path, config: dict[str, Any], **hparams: Any) -> ExperimentConfig:
    return toy_config(
        folder, 3, entrypoint="engine_trials:OwnConfig",
        hyperparameters={"zero_stage": 2, "ds_config": config, **hparams},
    )  # fmt: skip


@pytest.mark.slots
def test_auto_is_the_hyperparameter_of_that_name(warm_slots: Warm, tmp_path: Path) -> None:
    """The run equals one with the values written in the config, bit for bit. Without one of them,
    it is refused before training."""
    stored = []
    for name, config, hparams in (("given", GIVEN, {}), ("auto", AUTO, HPARAMS)):
        settings = own_config(tmp_path / name, config, **hparams)
        run = drive(warm_slots(2), settings, tmp_path / name, persist=True)
        (uuid,) = run.checkpoints
        stored.append(tensors(tmp_path / name / "checkpoints" / "checkpoints" / uuid))
    assert differing(*stored) == []

    lacking = own_config(tmp_path, AUTO, **{**HPARAMS, "learning_rate": None})
    keys = "optimizer.params.lr, scheduler.params.warmup_max_lr"
    with pytest.raises(RankFailed, match=f'has "auto" for {keys}, which only') as refused:
        drive(warm_slots(2), lacking, tmp_path / "lacking")
    assert refused.value.error_type == "TrialError"


@pytest.mark.parametrize(
    ("config", "hparams", "result"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"},
            {},
            {"train_batch_size": 8},
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            {"gradient_accumulation_steps": 3},
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        ),
        (
            {"train_batch_size": "auto", "gradient_accumulation_steps": 2},
            {},
            "train_batch_size",
        ),
        ({"fp16": {"enabled": "auto"}}, {"enabled": True}, "fp16.enabled"),
        ({"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}, "bf16.enabled"),
        ({"zero_optimization": {"stage": "auto"}}, {}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}, "_mine": "auto"},
            {"reduce_bucket_size": 1, "_mine": 1},
            {"zero_optimization": {"reduce_bucket_size": "auto"}, "_mine": "auto"},
        ),
    ],
    ids=["computed", "given", "no batch size", "precision", "section", "stage", "known"],
)
def test_what_is_filled_in(
    config: dict[str, Any], hparams: dict[str, Any], result: dict[str, Any] | str
) -> None:
    """Not what DeepSpeed computes from other batch sizes, and sections where it knows "auto"."""
    seen, _, left = filled(config, hparams)
    assert [".".join(key) for key in left] == ([result] if isinstance(result, str) else [])
    assert seen == (config if isinstance(result, str) else result)


def test_configs_are_as_before_without_a_trial() -> None:
    """Of Hugging Face's Trainer and accelerate, which fill them in themselves."""

    class Context:
        distributed = SimpleNamespace(get_rank=lambda: 0)

        def get_hparams(self) -> dict[str, Any]:
            return {}

    config, context = {"train_batch_size": 1, "gradient_clipping": "auto"}, Context()
    fill_auto_values(context)  # type: ignore[arg-type]
    with pytest.raises(TrialError, match="gradient_clipping"):
        DeepSpeedConfig(config)
    del context
    gc.collect()
    assert DeepSpeedConfig(config).gradient_clipping == "auto"
