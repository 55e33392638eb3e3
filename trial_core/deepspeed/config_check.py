"""Checks DeepSpeed's config for keys that cannot resume, and keys that DeepSpeed does not know.

DeepSpeed is imported only where it is needed: `trialflow doctor` reads the tables without it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from trial_core.config.error_text import did_you_mean
from trial_core.errors import TrialError

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

_OWN_WRITER = "remove it: trialflow writes every rank's files and uploads them during training"

_PLAIN_OFFLOAD = "remove it: offload_optimizer to the cpu works without it"

REFUSED = {
    "checkpoint.writer": (
        "DeepSpeed cannot read the files of its own writers with torch 2.6 or newer, does not "
        "build one without data_parallel, and a decoupled one still writes when the save has "
        f"ended; {_OWN_WRITER}"
    ),
    "datastates_ckpt": (
        f"its files are complete only after a later batch, and too late to be uploaded; "
        f"{_OWN_WRITER}"
    ),
    "data_efficiency.data_sampling.curriculum_learning": (
        "DeepSpeed's sampler does not save its random state, so that a resumed run trains on other "
        "samples; order the samples by difficulty in a sampler of the training loader"
    ),
    "zero_optimization.zenflow": (
        "DeepSpeed saves neither its moments nor what it has yet to add to the weights, so that a "
        f"resumed run has other losses, and exported weights are old; {_PLAIN_OFFLOAD}"
    ),
}
"""Key → why a run with it is refused, and what to do."""

_HPZ = "use zero_hpz_partition_size, which keeps a copy of the weights on each node"

REMOVED = {
    "amp": "use fp16, bf16 or torch_autocast",
    "compression_training": "remove it, and quantise or prune the exported weights",
    "curriculum_learning": "order the samples by difficulty in a sampler of the training loader",
    "eigenvalue": "remove it: it belonged to quantize_training",
    "elasticity": "give train_batch_size: a run resumes on another number of slots without it",
    "graph_harvesting": "use compile, and engine.compile()",
    "nebula": _OWN_WRITER,
    "progressive_layer_drop": "remove it: DeepSpeed has nothing in its place",
    "quantize_training": "remove it, and quantise the exported weights",
    "sparse_attention": "use an attention of torch in the model, as flex_attention",
    "sparse_gradients": "use torch.nn.Embedding(..., sparse=True), which needs no key",
    "zero_optimization.mics_hierarchical_params_gather": _HPZ,
    "zero_optimization.mics_shard_size": _HPZ,
    "zero_optimization.zeropp_loco_param": "remove it: zero_quantized_gradients works without it",
}
"""Key that DeepSpeed 0.19 has removed → what to do. DeepSpeed refuses a config that has one."""

_OF_INITIALIZE = frozenset({"data_parallel_size", "sequence_parallel_size"})
"""Keys that ``deepspeed.initialize`` reads itself."""


def refusals(config: Mapping[str, Any]) -> list[str]:
    """For each key with which a run is refused, the reason, and what to do."""
    found = [
        f"the DeepSpeed config's {key} is not supported: {why}"
        for key, why in REFUSED.items()
        if _is_on(_value(config, key))
    ]
    is_reordered = _is_on(_value(config, "zero_optimization.round_robin_gradients"))
    is_zero_12 = _value(config, "zero_optimization.stage") in (1, 2)
    if is_reordered and is_zero_12 and _is_on(_value(config, "checkpoint.load_universal")):
        found.append(
            "the DeepSpeed config's zero_optimization.round_robin_gradients is not supported: with "
            "checkpoint.load_universal, DeepSpeed gives weights the values of others on several "
            "ranks; remove it"
        )
    offload = _value(config, "zero_optimization.offload_optimizer")
    if is_zero_3(config) and isinstance(offload, Mapping):  # without effect on other stages
        if offload.get("device") == "nvme":
            found.append(
                "the DeepSpeed config's zero_optimization.offload_optimizer on nvme is not "
                "supported with ZeRO 3: DeepSpeed restores other optimizer states than it has "
                "saved, so that a resumed run has other losses; offload to the cpu"
            )
        if _is_on(offload.get("super_offload")):
            found.append(
                "the DeepSpeed config's zero_optimization.offload_optimizer.super_offload is not "
                "supported: DeepSpeed does not save its moments, so that a resumed run has other "
                f"losses; {_PLAIN_OFFLOAD}"
            )
    return found


def is_zero_3(config: Mapping[str, Any]) -> bool:
    return bool(_value(config, "zero_optimization.stage") == 3)


def removals(config: Mapping[str, Any]) -> list[str]:
    """For each key that DeepSpeed has removed, its replacement."""
    return [
        f"DeepSpeed has removed {key}: {instead}"
        for key, instead in REMOVED.items()
        if _value(config, key) is not None
    ]


def unknown_keys(config: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """For each top-level key that DeepSpeed ignores: its name, and the nearest one of `known`.

    A key that does not begin with a letter, as ``_comment``, is the user's own.
    """
    near = sorted({*known} - {*REMOVED})
    return [
        f'DeepSpeed ignores the unknown key "{key}" of its config{did_you_mean(key, near)}'
        for key in config
        if key[:1].isalpha() and key not in known
    ]


def config_of(engine: DeepSpeedEngine) -> Mapping[str, Any]:
    """As it was given, or read from a file."""
    found: Mapping[str, Any] = engine._config._param_dict
    return found


def check_engine_config(engine: DeepSpeedEngine, *, warns: bool) -> None:
    """Check the config of an engine that was built. Every rank calls this, and gets one result.

    Also turns off `elastic_checkpoint`, with which DeepSpeed does not read its own checkpoints.
    Raises TrialError if a checkpoint of the engine could not be resumed, or not to the same result.
    """
    config = config_of(engine)
    if found := refusals(config):
        raise TrialError("; ".join(found))
    is_frozen = any(not each.requires_grad for each in engine.module.parameters())
    if is_frozen and _value(config, "zero_optimization.offload_param.device") == "nvme":
        raise TrialError(
            "the DeepSpeed config's zero_optimization.offload_param on nvme is not supported with "
            "frozen weights: DeepSpeed saves none of those on NVMe; offload to the cpu"
        )
    warnings = unknown_keys(config, known_keys())
    if engine.zero_elastic_checkpoint():
        engine._config.zero_config.elastic_checkpoint = False
        if hasattr(engine.optimizer, "elastic_checkpoint"):
            engine.optimizer.elastic_checkpoint = False
        warnings.append(
            "the DeepSpeed config's zero_optimization.elastic_checkpoint is turned off: a run "
            "resumes on another number of slots without it; remove it"
        )
    for warning in warnings if warns else ():
        logger.warning(warning)


@cache
def known_keys() -> frozenset[str]:
    """The top-level keys that the installed DeepSpeed reads, found by giving it an empty config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Unchecked(DeepSpeedConfig):
        """Its batch is not the run's: see `micro_batches_of`."""

        def _configure_train_batch_size(self) -> None:
            self._set_batch_related_parameters()

    config = _AskedConfig(train_micro_batch_size_per_gpu=1)
    Unchecked(config)
    return frozenset(config.asked) | _OF_INITIALIZE


class _AskedConfig(dict[str, Any]):
    """A config that notes which keys it is asked for; copies of it note them in the same set."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # DeepSpeed asks `key in config.keys()`


def _value(config: Mapping[str, Any], key: str) -> Any:
    """The value at a key like ``checkpoint.writer``, or None."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_on(value: Any) -> bool:
    """True if a section exists, and is not switched off."""
    if isinstance(value, Mapping):
        return value.get("enabled", True) is not False
    return value is not None and value is not False
