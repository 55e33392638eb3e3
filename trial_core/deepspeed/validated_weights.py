"""The weights that validations see, in checkpoints of engines that train with others.

An optimizer with train and eval modes has two values of each weight, and so has a trial with an
`ExponentialMovingAverage`. DeepSpeed's files hold those of training. The file
``validated{index}/weights.pt`` holds the others, by the names of the module's ``state_dict``: an
export, an evaluation and a warm start with weights take them. A resumed run does not read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from trial_core.checkpoint import layout
from trial_core.checkpoint.weights.weights import Precision, SavedWeight, saved_weight
from trial_core.errors import CheckpointError, TrialError
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.trial.optimizer_modes import WeightCopies, optimizers_evaluating, with_modes

_FILE = "weights.pt"
_COPIES = {DeepSpeedZeroOptimizer: "bit16_groups_flat", BF16_Optimizer: "bf16_groups_flat"}
"""The flat weights that an engine computes with, where its optimizer steps on fp32 partitions."""


def validated_folder(index: int) -> str:
    """The folder of an engine's validated weights in a checkpoint."""
    return f"{layout.VALIDATED}{index}"


def check_modes(engines: Sequence[DeepSpeedEngine]) -> None:
    """Refuse, by a TrialError, an optimizer whose modes would not switch the weights with which its
    engine computes."""
    for engine in engines:
        for each in with_modes([engine.basic_optimizer]):
            weights = {id(one) for one in engine.module.parameters()}
            own = [one for group in each.param_groups for one in group["params"]]
            is_plain = bool(own) and all(id(one) in weights for one in own)
            if not _is_whole(engine) or not (is_plain or type(engine.optimizer) in _COPIES):
                raise TrialError(
                    f"{type(each).__name__} has train and eval modes, which a DeepSpeedTrial can "
                    "switch with ZeRO stages 1 and 2, and stage 0 in fp32, for a model that every "
                    "rank has whole. Here DeepSpeed's "
                    f"{type(engine.optimizer).__name__} would keep the weights of the train mode "
                    "in validations, or no rank has all weights. Train with such a stage, with a "
                    "PyTorchTrial, or with another optimizer"
                )
            # Switched before deepspeed.initialize, it has empty states of weights that are not its
            # own any more, and could not be saved.
            known = {id(one) for one in own}
            for key in [key for key in each.state if id(key) not in known and not each.state[key]]:
                del each.state[key]


def copies_of_modes(engines: Sequence[DeepSpeedEngine]) -> list[WeightCopies]:
    """The weights of engines that are copies of an optimizer's with modes: ZeRO 1 and 2, bf16."""
    return [
        WeightCopies(
            getattr(engine.optimizer, _COPIES[type(engine.optimizer)]),
            engine.optimizer.update_lp_params,
        )
        for engine in engines
        if with_modes([engine.basic_optimizer]) and type(engine.optimizer) in _COPIES
    ]


def write_validated(
    engines: Sequence[DeepSpeedEngine],
    folder: Path,
    averages: Sequence[Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write the weights that validations see, as far as they are not those of training.

    Collective: every rank calls this. `averages` are validated in place of all others, by engine;
    those of a model that is divided over ranks are not written.
    """
    for i, engine in enumerate(engines):
        if averages is not None and _is_whole(engine):
            own = {name.removeprefix("module."): each for name, each in averages[i].items()}
            _write(engine, folder / validated_folder(i), own)
        elif averages is None and (modes := with_modes([engine.basic_optimizer])):
            with optimizers_evaluating(modes, copies_of_modes([engine])):
                trained = {
                    name: each.detach()
                    for name, each in engine.module.named_parameters()
                    if each.requires_grad
                }
                _write(engine, folder / validated_folder(i), trained)


def _is_whole(engine: DeepSpeedEngine) -> bool:
    """True if every rank has all weights of the engine's model."""
    sharing = dist.get_world_size(group=engine.seq_data_parallel_group)
    is_divided = engine.zero_optimization_partition_weights() or engine.has_moe_layers
    return sharing == dist.get_world_size() and not is_divided


def _write(engine: DeepSpeedEngine, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    if dist.get_rank(group=engine.seq_data_parallel_group) != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    types = {name: each.dtype for name, each in engine.module.named_parameters()}
    content = {name: each.to(types[name]) for name, each in weights.items()}
    engine.checkpoint_engine.save(content, str(folder / _FILE))


def read_validated(folder: Path, index: int, reader: Reader) -> dict[str, torch.Tensor]:
    """What `write_validated` wrote of an engine, still in its file; nothing if it wrote nothing.

    Raises CheckpointError if the file holds something else than tensors by name.
    """
    path = folder / validated_folder(index) / _FILE
    content: Any = reader.load_mapped(path) if path.is_file() else {}
    if not isinstance(content, Mapping) or not all(
        isinstance(each, torch.Tensor) for each in content.values()
    ):
        raise CheckpointError(f"{path.parent.name}/{_FILE} holds something else than tensors")
    return dict(content)


def with_validated(
    weights: Mapping[str, SavedWeight], validated: Mapping[str, torch.Tensor], dtype: Precision
) -> dict[str, SavedWeight]:
    """`weights` of training, with the `validated` ones in their places, under all their names.

    Raises CheckpointError if a validated weight is not among them.
    """
    if unknown := validated.keys() - weights.keys():
        raise CheckpointError(
            f"the validated weights have names that the model lacks: {', '.join(sorted(unknown))}"
        )
    replaced = {weights[name]: saved_weight(each, dtype) for name, each in validated.items()}
    return {name: replaced.get(each, each) for name, each in weights.items()}


def is_validated(path: str, indices: Collection[int]) -> bool:
    """Return whether a checkpoint's file holds validated weights of one of these engines."""
    return path.startswith(tuple(f"{validated_folder(i)}/" for i in indices))
