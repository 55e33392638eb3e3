"""Fills in the ``"auto"`` values of DeepSpeed configs from hyperparameters, or refuses their keys.

Configs of Hugging Face's documentation have such values. transformers' Trainer and accelerate fill
them in before DeepSpeed gets the config. DeepSpeed itself knows ``"auto"`` only in some sections,
where it means the default.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any
from weakref import ref

from deepspeed.runtime.config import DeepSpeedConfig

from trial_core.deepspeed.config_check import known_keys
from trial_core.errors import TrialError
from trial_core.rank.trial.torch_context import TorchTrialContext

AUTO = "auto"
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_RATES = ("lr", "learning_rate")
_HYPERPARAMETERS = {
    "train_batch_size": ("train_batch_size", "global_batch_size"),
    "lr": _RATES,
    "warmup_max_lr": ("warmup_max_lr", *_RATES),
}
"""Names of hyperparameters for a key. All other keys have their own name only."""
_Key = tuple[str, ...]
_logger = logging.getLogger(__name__)
_initialize_params = DeepSpeedConfig._initialize_params
_context: ref[TorchTrialContext] | None = None


def fill_auto_values(context: TorchTrialContext) -> None:
    """Fill in the configs of engines that are built while `context` exists; a config that has other
    ``"auto"`` values is then a TrialError."""
    global _context
    _context = ref(context)
    DeepSpeedConfig._initialize_params = _fill_and_initialize


def filled(
    config: Mapping[str, Any], hparams: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[_Key]]:
    """A copy of a config with its ``"auto"`` values filled in.

    Also returns the values by key, and the keys for which there is no hyperparameter. Batch sizes
    that follow from others are left out, so that DeepSpeed computes them.
    """
    result, values, left = copy.deepcopy(dict(config)), dict[str, Any](), list[_Key]()
    for key in _auto_keys(config):
        section, name = reduce(getitem, key[:-1], result), key[-1]
        found = [hparams.get(each) for each in _hyperparameters(key)]
        value = next((each for each in found if each not in (None, AUTO)), None)
        if value is None or isinstance(value, Mapping):
            left.append(key)
        else:
            values[".".join(key)] = section[name] = value
    if any(result.get(size) not in (None, AUTO) for size in BATCH_SIZES[:2]):
        computed = [(size,) for size in BATCH_SIZES if result.get(size) == AUTO]
        left = [key for key in left if key not in computed]
        for (size,) in computed:
            del result[size]
    return result, values, left


def _fill_and_initialize(config: DeepSpeedConfig, given: Mapping[str, Any]) -> None:
    """Takes the place of the method with which a `DeepSpeedConfig` reads what it was `given`."""
    context = None if _context is None else _context()
    if context is not None and any(_auto_keys(given)):
        given, values, left = filled(given, context.get_hparams())
        if left:
            raise TrialError(_refusal(left))
        if values and context.distributed.get_rank() == 0:
            said = ", ".join(f"{key} = {value!r}" for key, value in values.items())
            _logger.info('"auto" values of the DeepSpeed config, from hyperparameters: %s', said)
        config._param_dict = copy.copy(given)
    _initialize_params(config, given)


def _refusal(left: list[_Key]) -> str:
    names = dict.fromkeys(_hyperparameters(key)[0] for key in left)
    return (
        f'the DeepSpeed config has "auto" for {", ".join(map(".".join, left))}, which only '
        "transformers' Trainer and accelerate fill in from their own arguments; write values "
        f"there, or give hyperparameters of these names: {', '.join(names)}"
    )


def _hyperparameters(key: _Key) -> tuple[str, ...]:
    name = key[-2] if key[-1] == "enabled" else key[-1]  # bf16.enabled: bf16
    return _HYPERPARAMETERS.get(name, (name,))


def _auto_keys(section: Mapping[str, Any], within: _Key = ()) -> Iterator[_Key]:
    """The keys with the value ``"auto"``, of which DeepSpeed does not know it, or trains otherwise.

    In other sections, as for the sizes of ZeRO's buckets, it means DeepSpeed's default.
    """
    for name, value in section.items():
        key = (*within, name)
        if isinstance(value, Mapping):
            yield from _auto_keys(value, key)
        elif isinstance(value, str) and value == AUTO:
            is_top = not within and name in known_keys()
            is_argument = within[:1] in (("optimizer",), ("scheduler",))
            if is_top or is_argument or name == "enabled" or key == ("zero_optimization", "stage"):
                yield key
