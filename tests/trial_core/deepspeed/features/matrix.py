"""The features of DeepSpeed, with the expected result of each in training, saving, resuming, …

A feature that DeepSpeed lacks on CPU ranks has a row with its error: a release that has it fails
the row's test, and the page changes. For the same reason there are rows with wrong results, and
with failures that could be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

from tests.trial_core.deepspeed.features.feature import (
    WORKS,
    Cell,
    Feature,
    Need,
    fails,
    held,
    refused,
    wrong,
)
from trial_core.deepspeed import op_builds

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
IN_16_BITS = 2e-2
"""Relative tolerance of losses in bf16 and fp16."""

HAS_FP16 = Need("a GPU, or a CPU with AVX512-FP16", lambda: get_accelerator().is_fp16_supported())
HAS_AIO = Need("libaio, and DeepSpeed's operator `async_io` built", lambda: _is_built("async_io"))
NO_CPU_OP = "This op had not been implemented on CPU backend"


def _is_built(op: str) -> bool:
    """Return whether ranks find an operator of DeepSpeed's, whose compilation takes minutes."""
    return any(op_builds._build_folder().glob(f"{op}/*.so"))


def zero(**options: Any) -> dict[str, Any]:
    """Options of ZeRO."""
    return {"zero_optimization": options}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    """An optimizer of DeepSpeed's instead of the toy's."""
    return {"optimizer": {"type": kind, "params": {"torch_adam": None, **params}}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    """A schedule of DeepSpeed's instead of the toy's."""
    return {"scheduler": {"type": kind, "params": {"warmup_num_steps": None, **params}}}


def section(name: str, **options: Any) -> dict[str, Any]:
    """A section of DeepSpeed's config that is switched on."""
    return {name: {"enabled": True, **options}}


def accumulating(micro_batches: int, **hparams: Any) -> Callable[[int], dict[str, Any]]:
    """Hyperparameters with as many micro-batches on all ranks together."""
    return lambda ranks: {"accumulation": micro_batches // ranks, **hparams}


def toy(name: str) -> str:
    """A trial of the matrix."""
    return f"feature_trials:{name}"


Precision = partial(Feature, "ZeRO and precision")

PRECISIONS = [
    *(
        row
        for stage in range(4)
        for row in (
            Precision(f"zero {stage} fp32", f"ZeRO {stage}", zero=stage, is_default=stage == 1),
            Precision(
                f"zero {stage} bf16", f"ZeRO {stage} in bf16", BF16, stage, tolerance=IN_16_BITS,
            ),
            Precision(
                f"zero {stage} fp16", f"ZeRO {stage} in fp16, dynamic loss scale", FP16, stage,
                tolerance=IN_16_BITS, need=HAS_FP16,
            ),
        )
    ),
    Precision(
        "autocast", "`torch_autocast` in bf16", section("torch_autocast", dtype="bfloat16"), 2,
        tolerance=IN_16_BITS,
    ),
    Precision(
        "gradient type", "`data_types.grad_accum_dtype` fp32 in bf16",
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, 2, tolerance=IN_16_BITS,
    ),
    Precision(
        "communication type", "`communication_data_type` bf16 in bf16",
        {**BF16, "communication_data_type": "bf16"}, tolerance=IN_16_BITS,
    ),
    Precision("clipping", "`gradient_clipping`", {"gradient_clipping": 0.1}),
]  # fmt: skip

Zero = partial(Feature, "Options of ZeRO")

ZERO_OPTIONS = [
    *(
        Zero(
            f"zero {stage} contiguous {contiguous}".lower(),
            f"ZeRO {stage}, `contiguous_gradients` and `overlap_comm` {contiguous}".lower(),
            zero(contiguous_gradients=contiguous, overlap_comm=contiguous), stage,
        )
        for stage in (1, 2, 3)
        for contiguous in (True, False)
    ),
    Zero(
        "round robin", "`round_robin_gradients`", zero(round_robin_gradients=True), 2,
    ),
    Zero("zero.Init", "a model built under `deepspeed.zero.Init`", zero=3, trial=toy("ZeroInit")),
    Zero(
        "hpz", "hpZ: `zero_hpz_partition_size`", zero(zero_hpz_partition_size=2), 3, fewest=2,
    ),
    Zero(
        "qwz", "`zero_quantized_weights`: needs a GPU", zero(zero_quantized_weights=True), 3,
        train=refused(NO_CPU_OP), gpu=WORKS, fewest=2,
    ),
    Zero(
        "qgz", "`zero_quantized_gradients`: no effect on one machine; on several it needs a GPU",
        zero(zero_quantized_gradients=True), 3,
    ),
    Zero(
        "elastic checkpoint", "`elastic_checkpoint`: turned off, with a warning",
        zero(elastic_checkpoint=True),
    ),
]  # fmt: skip

Offload = partial(Feature, "Offload")
CPU_ADAM = optimizer("AdamW")
TO_CPU = {"device": "cpu"}
TO_NVME = {"device": "nvme", "nvme_path": "{folder}"}
ZENFLOW = {
    "topk_ratio": 0.25, "select_strategy": "step", "select_interval": 2, "update_interval": 2,
}  # fmt: skip

OFFLOADS = [
    *(
        Offload(
            f"offload {stage}", f"ZeRO {stage}, optimizer on the CPU",
            {**CPU_ADAM, **zero(offload_optimizer=TO_CPU)}, stage,
        )
        for stage in (1, 2, 3)
    ),
    Offload(
        "offload parameters", "ZeRO 3, optimizer and parameters on the CPU",
        {**CPU_ADAM, **zero(offload_optimizer=TO_CPU, offload_param=TO_CPU)}, 3,
    ),
    Offload(
        "superoffload", "`super_offload`",
        {**CPU_ADAM, **zero(offload_optimizer={**TO_CPU, "super_offload": True})}, 3,
        train=refused("a resumed run has other losses"),
    ),
    *(
        Offload(
            f"zenflow {stage}", f"ZenFlow with ZeRO {stage}",
            {**CPU_ADAM, **zero(offload_optimizer=TO_CPU, zenflow=ZENFLOW)}, stage,
            train=refused("a resumed run has other losses, and exported weights are old"),
        )
        for stage in (3, 2)
    ),
    Offload(
        "nvme 3", "ZeRO 3, optimizer on NVMe (DeepNVMe, libaio)",
        {**CPU_ADAM, **zero(offload_optimizer=TO_NVME)}, 3, need=HAS_AIO,
        train=refused("a resumed run has other losses"),
    ),
    *(
        Offload(
            name, about,
            {**BF16, **CPU_ADAM, **zero(offload_optimizer=TO_CPU, offload_param=TO_NVME)}, 3,
            trial=toy("OneGroup"), need=HAS_AIO, tolerance=IN_16_BITS, train=outcome,
            hparams=lambda _, freezes=outcome is not WORKS: {"wide": True, "freezes": freezes},
        )
        for name, about, outcome in (
            ("nvme parameters", "ZeRO 3 in bf16, parameters on NVMe, optimizer on the CPU", WORKS),
            ("nvme frozen", "… with frozen weights", refused("saves none of those on NVMe")),
        )
    ),
    Offload(
        "nvme 2", "ZeRO 2 with `nvme`: DeepSpeed keeps the optimizer on the CPU",
        {**CPU_ADAM, **zero(offload_optimizer=TO_NVME)}, 2,
    ),
]  # fmt: skip

Optimizer = partial(Feature, "Optimizers and schedules")
REMOVED = "is not a supported DeepSpeed Optimizer"
SCHEDULES = {
    "LRRangeTest": {}, "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01},
    "WarmupDecayLR": {"total_num_steps": 20}, "WarmupCosineLR": {"total_num_steps": 20},
}  # fmt: skip

OPTIMIZERS = [
    Optimizer(
        "client optimizer", "the trial's own optimizer and schedule", zero=2,
        trial=toy("ClientOptimizer"),
    ),
    *(
        Optimizer(
            f"sgd {stage}", f"`SGD` with ZeRO {stage}",
            {**optimizer("SGD"), "zero_allow_untested_optimizer": True}, stage,
        )
        for stage in (0, 1, 3)
    ),
    *(
        Optimizer(f"muon {stage}", f"`Muon` with ZeRO {stage}", optimizer("Muon"), stage,
            trial=toy("Muon"))
        for stage in (1, 2)
    ),
    Optimizer("muon 0", "`Muon` without ZeRO", optimizer("Muon"), 0, trial=toy("Muon")),
    Optimizer(
        "muon 3", "`Muon` with ZeRO 3, `reduce_scatter` false",
        {**optimizer("Muon"), **zero(reduce_scatter=False)}, 3, trial=toy("Muon"),
    ),
    Optimizer(
        "muon 3 scatter", "`Muon` with ZeRO 3, as it is", optimizer("Muon"), 3, trial=toy("Muon"),
        train=refused("Muon and reduce scatter cannot be used together"),
    ),
    Optimizer("adagrad 0", "`Adagrad` without ZeRO", optimizer("Adagrad"), 0),
    Optimizer(
        "adagrad 1", "`Adagrad` with ZeRO", optimizer("Adagrad"),
        train=fails("list index out of range"),
    ),
    *(
        Optimizer(
            kind.lower(), f"`{kind}`: needs a GPU", optimizer(kind), 0, train=refused(NO_CPU_OP),
            gpu=WORKS,
        )
        for kind in ("Lamb", "Lion")
    ),
    *(
        Optimizer(
            kind, f"`{kind}`, with compressed communication: removed from DeepSpeed",
            optimizer(kind), 0, train=refused(f"{kind} {REMOVED}"),
        )
        for kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    ),
    *(
        Optimizer(kind, f"the schedule `{kind}`", scheduler(kind, **params))
        for kind, params in SCHEDULES.items()
    ),
    Optimizer("no schedule", "no schedule", {"scheduler": None}),
    Optimizer(
        "averaged", "`ExponentialMovingAverage`, a callback", zero=2, trial=toy("Averaged")
    ),
]  # fmt: skip

Model = partial(Feature, "Models and memory")
RECOMPUTED = toy("CheckpointedActivations")

MODELS = [
    Model("recomputed", "activation checkpointing", {"activation_checkpointing": {}}, 2,
        trial=RECOMPUTED),
    Model(
        "partitioned activations", "… with `partition_activations`",
        {"activation_checkpointing": {"partition_activations": True}}, 2, trial=RECOMPUTED,
    ),
    Model(
        "activations on CPU", "… with `cpu_checkpointing`: needs a GPU",
        {"activation_checkpointing": {"cpu_checkpointing": True}}, 2, trial=RECOMPUTED,
        train=fails("but got input of size[]"), gpu=WORKS,
    ),
    Model(
        "compiled", "`engine.compile()`, the backend aot_eager", zero=2, trial=toy("Compiled"),
        hparams=lambda _: {"backend": "aot_eager"},
    ),
    Model(
        "deepcompile", "DeepCompile: needs a GPU", {"compile": {"deepcompile": True}},
        trial=toy("Compiled"), hparams=lambda _: {"backend": "eager"},
        train=fails("Error building extension 'dc'"),
        gpu=fails("All param inputs should have param_id"),
    ),
    Model(
        "sparse embedding", "`torch.nn.Embedding(sparse=True)`", optimizer("SGD"), 0,
        trial=toy("SparseGradients"),
    ),
    *(
        Model(
            f"hf {stage}", f"a model of `transformers`, `HfDeepSpeedConfig`, ZeRO {stage}",
            zero=stage, trial=toy("HuggingFace"), hparams=lambda _: {"kind": "llama"},
        )
        for stage in (1, 3)
    ),
]  # fmt: skip

EXPORTS = "tests/trial_core/deepspeed/export/test_engine_weights.py"
EXPERTS = (
    "tests/trial_core/deepspeed/reshard/test_topology_models.py::test_experts_that_each_rank_has"
)
DIVIDED_EXPERTS = "was saved with an ep_size > 1"
LAYOUTS = "tests/trial_core/deepspeed/test_engine_layouts.py"
SAME_SAMPLES = "test_two_ranks_of_a_group_train_the_same_samples"
TENSOR_PARALLEL = (
    "tests/trial_core/deepspeed/test_model_parallel.py"
    "::test_a_model_of_two_ranks_resumes_bit_identically"
)
Parallel = partial(Feature, "Several engines, and models over several ranks")

PARALLEL = [
    *(
        Parallel(
            f"two engines {stage}", f"two engines, ZeRO {stage}", zero=stage,
            trial=toy("TwoEngines"), hparams=accumulating(4), tolerance=None,
        )
        for stage in (1, 3)
    ),
    *(
        Parallel(
            f"pipeline {stage}", f"a pipeline of 2 stages, ZeRO {stage}; 4 ranks and back",
            zero=stage, trial=toy("Pipeline"), hparams=accumulating(8), ranks=(2, 4),
            tolerance=None, fewest=2,
        )
        for stage in (0, 1)
    ),
    *(
        Parallel(
            f"moe {groups} zero {stage}", f"mixture of experts, `ep_size` {groups}, ZeRO {stage}",
            zero=stage, trial=toy("MixtureOfExperts"), hparams=accumulating(4, experts=groups),
            fewest=groups,
            other_ranks=held(EXPERTS) if groups == 1 else refused(DIVIDED_EXPERTS),
            export=held(f"{EXPORTS}::test_experts_have_their_global_names"),
        )
        for groups, stage in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2))
    ),
    *(
        Parallel(
            f"autotp {name}", f"AutoTP of a model of `transformers`, {about}",
            {"tensor_parallel": {"autotp_size": 2}}, trial=toy("HuggingFace"),
            hparams=lambda _, unit=unit: {"kind": "llama", "tensor_parallel": unit},
            other_ranks=fails("AssertionError: without a message"), fewest=2,
            export=held(f"{EXPORTS}::test_the_parts_of_tensor_parallel_ranks_are_joined"),
        )
        for name, about, unit in (
            ("alone", "without `set_mpu`", False), ("mpu", "with `set_mpu`", True)
        )
    ),
    Parallel(
        "autoep", "AutoEP of a model of `transformers`",
        section("expert_parallel", autoep_size=2), trial=toy("HuggingFace"),
        hparams=lambda _: {"kind": "mixtral"}, train=fails("_CanRecordRegistry.get() takes 2"),
        fewest=2,
    ),
    Parallel(
        "autosp", "AutoSP of a model of `transformers`",
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2},
        trial=toy("HuggingFace"), hparams=lambda _: {"kind": "llama"},
        train=fails("Failed to find a node for the input sequence"), fewest=2,
    ),
    Parallel(
        "ulysses", "Ulysses sequence parallelism, without `set_mpu`",
        **dict.fromkeys(("train", "save", "resume"), held(f"{LAYOUTS}::{SAME_SAMPLES}")),
        other_ranks=held(f"{LAYOUTS}::test_from_two_ranks_to_one_and_back"),
        export=held(f"{LAYOUTS}::test_from_two_ranks_to_one_and_back"),
    ),
    Parallel(
        "tensor parallel", "tensor parallelism by hand, with `set_mpu`",
        train=held(TENSOR_PARALLEL), save=held(TENSOR_PARALLEL), resume=held(TENSOR_PARALLEL),
        other_ranks=held(
            "tests/trial_core/deepspeed/reshard/test_topology_models.py"
            "::test_from_one_copy_to_two_and_back"
        ),
        export=Cell(
            "refused", "is split over 2 model-parallel ranks",
            "tests/trial_core/deepspeed/export/test_engine_weights.py"
            "::test_weights_that_cannot_be_joined_are_refused",
        ),
    ),
]  # fmt: skip

Watch = partial(Feature, "Profilers and monitors")

WATCHED = [
    Watch("flops profiler", "`flops_profiler`", section("flops_profiler", profile_step=2)),
    Watch("breakdown", "`wall_clock_breakdown`", {"wall_clock_breakdown": True}),
    Watch("csv monitor", "`csv_monitor`", section("csv_monitor", output_path="{folder}")),
    Watch("tensorboard", "`tensorboard`", section("tensorboard", output_path="{folder}")),
]  # fmt: skip

HERE = "tests/trial_core/deepspeed/features/test_features.py"
REMOVED_KEYS = (
    *_REMOVED_TOP_LEVEL_CONFIG_KEYS,
    *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS),
)
Saved = partial(Feature, "Checkpoints, and keys that DeepSpeed has removed")

SAVED = [
    Saved("tags compared", "`checkpoint.tag_validation` Fail",
        {"checkpoint": {"tag_validation": "Fail"}}),
    Saved("tags not compared", "`checkpoint.tag_validation` Ignore",
        {"checkpoint": {"tag_validation": "Ignore"}}),
    *(
        Saved(
            f"writer {name}", f"`checkpoint.writer` {name}", {"checkpoint": {"writer": writer}},
            train=refused("checkpoint.writer is not supported"),
        )
        for name, writer in (
            ("fast", {"type": "fast"}), ("python", {"type": "python"}),
            ("decoupled", {"type": "python", "decoupled": True}),
        )
    ),
    Saved("universal", "`checkpoint.load_universal`", {"checkpoint": {"load_universal": True}}),
    Saved(
        "without frozen", "`checkpointing.exclude_frozen_parameters` of the experiment", zero=2,
        experiment={"checkpointing": {"exclude_frozen_parameters": True}},
        other_ranks=held(
            "tests/trial_core/deepspeed/reshard/test_topology_training.py"
            "::test_excluded_frozen_parameters_stay_as_initialised"
        ),
        export=wrong("2 of 9"),
    ),
    Saved(
        "unknown key", "a key that DeepSpeed does not know, for example `zero_optimisation`",
        {"zero_optimisation": {"stage": 1}},
    ),
    Saved(
        "managed", "`managed_gradient_accumulation` false, with automatic accumulation",
        {"managed_gradient_accumulation": False},
        train=refused("managed_gradient_accumulation is false"),
    ),
    *(
        Saved(
            key, f"`{key}`: removed from DeepSpeed",
            train=Cell("fails", "has been removed", f"{HERE}::test_a_removed_key_is_refused"),
        )
        for key in REMOVED_KEYS
    ),
]  # fmt: skip

FEATURES = [
    *PRECISIONS, *ZERO_OPTIONS, *OFFLOADS, *OPTIMIZERS, *MODELS, *PARALLEL, *WATCHED, *SAVED
]  # fmt: skip
