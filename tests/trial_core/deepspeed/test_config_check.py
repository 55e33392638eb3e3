"""What is refused, turned off or warned of in DeepSpeed's config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import config as deepspeed_config

from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.deepspeed.config_check import (
    REMOVED,
    check_engine_config,
    known_keys,
    refusals,
    removals,
    unknown_keys,
)
from trial_core.errors import TrialError
from trial_core.processes.slots.slot_group import SlotGroup

Warm = Callable[[int], SlotGroup]

DOCUMENTED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer", "scheduler", "communication_data_type", "prescale_gradients",
    "gradient_predivide_factor", "fp16", "bf16", "torch_autocast", "gradient_clipping",
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio",
    "steps_per_print", "wall_clock_breakdown", "dump_state", "flops_profiler",
    "activation_checkpointing", "data_efficiency", "tensorboard", "wandb", "csv_monitor",
    "comet", "comms_logger", "checkpoint", "data_types", "pipeline", "autotuning",
    "hybrid_engine", "compile", "tensor_parallel", "expert_parallel", "sequence_parallel_size",
    "timers", "seq_parallel_communication_data_type", "dataloader_drop_last",
    "disable_allgather", "memory_breakdown", "managed_gradient_accumulation",
)  # fmt: skip
"""Top-level keys of DeepSpeed's documentation."""


OFFLOAD = "zero_optimization.offload_optimizer"


def offloading(stage: int, **options: Any) -> dict[str, Any]:
    """A config that offloads the optimizer to the CPU."""
    return {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", **options}}
    }


def reordering(stage: int) -> dict[str, Any]:
    """A config with another order of parameters."""
    return {"zero_optimization": {"stage": stage, "round_robin_gradients": True}}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "datastates_ckpt"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "data_efficiency.data_sampling.curriculum_learning",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        (offloading(stage=3, super_offload=True), f"{OFFLOAD}.super_offload"),
        (
            {"checkpoint": {"load_universal": True}, **reordering(stage=1)},
            "zero_optimization.round_robin_gradients",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(config: dict[str, Any], key: str) -> None:
    """The message has the key, and what to do."""
    (problem,) = refusals(config)
    assert problem.startswith(f"the DeepSpeed config's {key} is not supported: ")
    assert "remove it" in problem or "sampler of the training loader" in problem


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"checkpoint": {"writer": None, "tag_validation": "Fail", "parallel_write": {}}},
        {"datastates_ckpt": False},
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": False}}}},
        {"zero_optimization": {"zenflow": None}},
        offloading(stage=3, super_offload=False),
        offloading(stage=2, super_offload=True),  # without effect
        {"checkpoint": {"load_universal": False}, **reordering(stage=1)},
        {"checkpoint": {"load_universal": True}, **reordering(stage=3)},  # without effect
    ],
)
def test_what_is_switched_off_is_not_refused(config: dict[str, Any]) -> None:
    """Configs name sections that they do not use."""
    assert refusals(config) == []


def test_every_key_that_deepspeed_has_removed_has_a_substitute() -> None:
    """A new version that removes another one is noticed here."""
    top = deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    zero = deepspeed_config._REMOVED_ZERO_CONFIG_KEYS
    assert {*REMOVED} == {*top, *(f"zero_optimization.{key}" for key in zero)}
    config = {"amp": {"enabled": False}, "zero_optimization": {"mics_shard_size": 2}}
    assert [problem.partition(":")[0] for problem in removals(config)] == [
        "DeepSpeed has removed amp",
        "DeepSpeed has removed zero_optimization.mics_shard_size",
    ]


def test_documented_keys_are_known() -> None:
    """Nor is there a warning of what DeepSpeed leaves to others: inner sections, comments."""
    config = {"_comment": 1, "//": 2, **{key: {"my": {"own": 1}} for key in DOCUMENTED}}
    assert unknown_keys(config, known_keys()) == []


def test_an_unknown_key_is_named_with_the_nearest_one() -> None:
    """DeepSpeed would train without it, and without a word."""
    config = {"zero_optimisation": {"stage": 3}, "elastisity": {}, "train_batch_size": 8}
    assert unknown_keys(config, known_keys()) == [
        'DeepSpeed ignores the unknown key "zero_optimisation" of its config; did you mean '
        '"zero_optimization"?',
        'DeepSpeed ignores the unknown key "elastisity" of its config',
    ]


@pytest.mark.parametrize("warns", [True, False])
def test_one_rank_warns_when_an_engine_is_wrapped(
    warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a key that DeepSpeed ignores, and of one that is turned off."""
    config = {"mine": 1, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}}
    zero_config = SimpleNamespace(elastic_checkpoint=True)
    engine: Any = SimpleNamespace(
        _config=SimpleNamespace(_param_dict=config, zero_config=zero_config),
        zero_elastic_checkpoint=lambda: True,
        optimizer=None,
        module=torch.nn.Linear(2, 2),
    )
    with caplog.at_level(logging.WARNING, "trial_core"):
        check_engine_config(engine, warns=warns)
    assert not zero_config.elastic_checkpoint
    told = [record.message.split()[-1] for record in caplog.records]
    assert told == (["config", "it"] if warns else [])
    config["datastates_ckpt"] = {}
    with pytest.raises(TrialError, match="datastates_ckpt is not supported"):
        check_engine_config(engine, warns=warns)


@pytest.mark.slots
@pytest.mark.parametrize(
    "zero_stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))]
)
def test_what_deepspeed_alone_cannot_resume(
    warm_slots: Warm, tmp_path: Path, zero_stage: int
) -> None:
    """With `elastic_checkpoint`, `load_universal`, strict tags, and a step after each batch."""
    assert_resuming_is_bit_identical(
        warm_slots(2),
        tmp_path,
        "engine_trials:OneStep",
        accumulation=3,
        ds_config={
            "zero_optimization": {"stage": zero_stage, "elastic_checkpoint": True},
            "checkpoint": {
                "load_universal": True,
                "tag_validation": "Fail",
                "parallel_write": {"pipeline_stage": True},
                "checkpoint_serialization": False,
            },
            "managed_gradient_accumulation": False,
        },
    )
