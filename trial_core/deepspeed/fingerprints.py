"""Fingerprints of an engine's tensors, by name: to check loaded and exported tensors.

ZeRO's flat buffers hold no names; only arithmetic tells which elements are whose. If it is wrong,
weights are silently exchanged. So a save records the bits of each parameter and persistent buffer
of the live module by its name, and a load and an export compare them.

The optimizer's fp32 weights, cast to the type of the module's, must have the same bits. That does
not hold for a weight that the trial itself changed after the optimizer's step: the save does not
record it. Types and sizes that differ are not compared.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from trial_core.checkpoint.json_objects import decode_mapping
from trial_core.common.text_format import first_few
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.state_files.bit_sum import bit_sum
from trial_core.rank.state_files.late_copies import collecting

FILE_PREFIX = "trialflow/fingerprints-"
_VERSION = 2
_HALVES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16)}
_PARTITIONED = {
    DeepSpeedZeroOptimizer: ("bit16", "single_partition_of_fp32_groups"),
    BF16_Optimizer: ("bf16", "fp32_groups_flat_partition"),
}
"""Prefix of the names of groups and flat buffers, and name of the fp32 weights."""
_logger = logging.getLogger(__name__)


class Fingerprint(NamedTuple):
    """Type, number of elements, and `bit_sum` of a whole tensor."""

    dtype: str
    elements: int
    bits: int


_Fragment = tuple[torch.Tensor, int]
"""Consecutive elements of a flattened tensor, and the index of the first of them."""


@dataclass
class _Tensor:
    """A parameter or persistent buffer of an engine's module.

    Attributes:
        elements: of the whole tensor.
        group: the ranks that share it, or hold a part of it each.
        own: the elements that this rank sums. All ranks of the group together sum all.
        master: returns the optimizer's fp32 weights of these elements, if it has any.
        names: in the module's ``state_dict``; several if it is tied.
        is_trained: True for a parameter that an optimizer's step changes, and nothing else.
    """

    elements: int
    group: Any
    own: _Fragment
    master: Callable[[], _Fragment] | None
    names: list[str] = field(default_factory=list)
    is_trained: bool = False

    def fingerprint(self) -> Fingerprint:
        """Without its bits."""
        return Fingerprint(str(self.own[0].dtype), self.elements, 0)

    def fixed(self) -> _Tensor:
        """With the fp32 weights of now, which are then read without DeepSpeed."""
        master = self.master() if self.master else None
        return replace(self, master=None if master is None else lambda: master)

    def recorded(self) -> list[Any]:
        """What this rank records: also its group, by its first rank, and what it has summed."""
        bits, of_master, count = self.sums()
        first = dist.get_process_group_ranks(self.group)[0]
        return [str(self.own[0].dtype), self.elements, first, count, int(bits), int(of_master)]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """This rank's sums over the weights, and over the fp32 weights; of how many elements."""
        (own, first), dtype = self.own, self.own[0].dtype
        bits = of_master = bit_sum(own, first)
        if self.master:
            of_master = bit_sum(*self.master(), dtype, own.device)  # may be offloaded
        return bits, of_master, own.numel()


def record_fingerprints(
    engines: Sequence[DeepSpeedEngine], folder: Path, rank: int, excludes_frozen: Sequence[bool]
) -> None:
    """Write this rank's share of the fingerprints of the engines' tensors; later, if copies are.

    A rank's file has the sums over the elements that it holds; `fingerprints_of` adds them up. Of
    an engine that `excludes_frozen`, frozen parameters are not saved.
    """
    late = collecting()
    parts: list[tuple[int, list[tuple[list[str], Callable[[], list[Any]]]]]] = []
    read_later: list[torch.Tensor] = []
    for engine, excludes in zip(engines, excludes_frozen, strict=True):
        summing: list[tuple[list[str], Callable[[], list[Any]]]] = []
        for each in _tensors(engine, excludes):
            if not each.own[0].numel():
                continue
            if late is not None and each.is_trained:
                read_later.append(each.own[0])
                summing.append((each.names, each.fixed().recorded))
            else:  # the next forward pass may change it
                summing.append((each.names, partial(list, each.recorded())))
        parts.append((engine.checkpoint_mp_rank, summing))
    if not any(summing for _, summing in parts):
        return
    path = folder / f"{FILE_PREFIX}{rank:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        recorded = []
        for model_rank, summing in parts:
            summed = ((names, sum_up()) for names, sum_up in summing)
            own = {name: values for names, values in summed for name in names}
            recorded.append({"model_rank": model_rank, "tensors": own})
        path.write_text(json.dumps({"version": _VERSION, "engines": recorded}))

    if late is None:
        write()
    else:
        late.later(write, read_later)


def check_loaded(
    engines: Sequence[DeepSpeedEngine], folder: Path, distributed: DistributedContext
) -> None:
    """Check that the engines hold the saved tensors, if those have fingerprints.

    Collective: every rank calls this, and raises a CheckpointError that names all that differ.
    """
    wrong: list[str] = []
    for i, engine in enumerate(engines):
        saved = fingerprints_of(folder, i, engine.checkpoint_mp_rank)
        tensors = [
            each
            for each in (_tensors(engine) if saved else ())
            if _is_comparable(each.names[0], saved, each.fingerprint())
        ]
        for each, (*seen, count) in zip(tensors, _summed(tensors), strict=True):
            name = each.names[0]
            if count == each.elements and {*seen} != {saved[name].bits}:
                wrong.append(f"model{i}: {name}")
    names = dict.fromkeys(name for each in distributed.allgather(wrong) for name in each)
    _refuse(
        names,
        "loaded",
        "Resume with as many slots, and the ZeRO stage and DeepSpeed configuration, that saved the "
        "checkpoint; or load only the weights: searcher.source_weights_only=true",
    )


def check_exported(saved: Mapping[str, Fingerprint], weights: Mapping[str, torch.Tensor]) -> None:
    """Check that exported weights are the saved ones. Raises CheckpointError if some are not."""
    wrong = list[str]()
    for name, weight in weights.items():
        dtype = weight.dtype
        if name in saved and dtype == torch.float32:
            dtype = _HALVES.get(saved[name].dtype, dtype)
        if _is_comparable(name, saved, Fingerprint(str(dtype), weight.numel(), 0)):
            bits = int(bit_sum(weight, dtype=dtype))
            if bits != saved[name].bits and not (weight != weight).any():  # a NaN has many bits
                wrong.append(name)
    _refuse(wrong, "exported", "Resume the checkpoint, and write the weights in the trial")


def _is_comparable(name: str, saved: Mapping[str, Fingerprint], seen: Fingerprint) -> bool:
    """True if a tensor was recorded with the type and size that it has now."""
    if name in saved and saved[name][:2] == seen[:2]:
        return True
    _logger.debug("%s is not compared: saved as %s, now %s", name, saved.get(name), seen[:2])
    return False


def _refuse(wrong: Collection[str], verb: str, advice: str) -> None:
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of the {verb} tensors are not those that the model had when the "
            f"checkpoint was saved: {first_few(wrong)}; this version of trialflow does not know "
            f"how DeepSpeed lays out the state of this engine. {advice}"
        )


def fingerprints_of(
    folder: Path, engine: int, model_rank: int | None = None
) -> dict[str, Fingerprint]:
    """The recorded fingerprints of an engine, or of one of its model-parallel ranks, by name.

    Without names that ranks disagree about, of which a part is missing, or whose fp32 weights had
    other bits. Raises CheckpointDamaged if a file has none.
    """
    sums: dict[tuple[Any, ...], list[int]] = {}
    for file in folder.glob(f"{FILE_PREFIX}*.json"):
        recorded = decode_mapping(file.read_bytes(), file.name)
        try:
            for each in recorded["engines"][engine : engine + 1]:
                if recorded["version"] == _VERSION and model_rank in (None, each["model_rank"]):
                    for name, (dtype, elements, group, *own) in each["tensors"].items():
                        key = name, dtype, elements, each["model_rank"], group
                        before = sums.setdefault(key, [0, 0, 0])
                        sums[key] = [a + b for a, b in zip(before, own, strict=True)]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointDamaged(f"{file.name} holds no fingerprints: {error!r}") from error
    found: dict[str, set[Fingerprint]] = {}
    for (name, dtype, elements, *_), (count, bits, of_master) in sums.items():
        if count == elements and _as_int64(bits) == _as_int64(of_master):
            found.setdefault(name, set()).add(Fingerprint(dtype, elements, _as_int64(bits)))
    return {name: each.pop() for name, each in found.items() if len(each) == 1}


def _as_int64(total: int) -> int:
    """A sum modulo 2**64, as torch's integers have it."""
    return (total + 2**63) % 2**64 - 2**63


# ------------------------------------------------------------------------------ the live engine


def _tensors(engine: DeepSpeedEngine, exclude_frozen: bool = False) -> list[_Tensor]:
    """The parameters and persistent buffers of an engine's module; none if some are elsewhere."""
    optimizer, offload = engine.optimizer, engine.zero_offload_param()
    is_known = type(optimizer) in (*_PARTITIONED, DeepSpeedZeroOptimizer_Stage3)
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        return []
    if engine.zero_optimization() and not is_known:
        return []
    masters = dict(_masters(optimizer)) if type(optimizer) in _PARTITIONED else {}
    found: dict[int, _Tensor] = {}
    for name, tensor in _named_tensors(engine.module):
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if not exclude_frozen or not is_frozen:
            if id(tensor) not in found:
                found[id(tensor)] = _tensor(engine, tensor, masters.get(id(tensor)))
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                found[id(tensor)].is_trained = is_parameter and not is_frozen
            found[id(tensor)].names.append(name)
    return list(found.values())


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and name not in part._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                if is_moe_param(tensor):  # each rank counts its own experts from 0
                    expert_rank = groups._get_expert_parallel_rank(tensor.group_name)
                    full = f"{full} of expert-parallel rank {expert_rank}"
                yield full, tensor


def _tensor(engine: DeepSpeedEngine, tensor: Any, master: _Fragment | None) -> _Tensor:
    if hasattr(tensor, "ds_tensor"):
        group, part = tensor.ds_process_group, tensor.ds_tensor.ds_numel
        first = dist.get_rank(group) * part
        count = max(0, min(part, tensor.ds_numel - first))  # without padding
        own = tensor.ds_tensor.detach().reshape(-1)[:count], first
        # The optimizer has the fp32 weights of a parameter that was frozen since, too.
        is_trained = tensor.ds_id in getattr(engine.optimizer, "grad_position", ())
        read = (lambda: (_zero_3_master(engine, tensor)[:count], first)) if is_trained else None
        return _Tensor(tensor.ds_numel, group, own, read)
    group, flat = engine.seq_data_parallel_group, tensor.detach().reshape(-1)
    if is_moe_param(tensor):
        group = groups._get_expert_data_parallel_group(tensor.group_name)
    if master is None:  # the first rank's is saved
        own = (flat if dist.get_rank(group) == 0 else flat[:0]), 0
        return _Tensor(flat.numel(), group, own, None)
    first, last = master[1], master[1] + master[0].numel()
    return _Tensor(flat.numel(), group, (flat[first:last], first), lambda: master)


def _zero_3_master(engine: DeepSpeedEngine, parameter: Any) -> torch.Tensor:
    """This rank's fp32 weights. DeepSpeed's public function returns None while it is frozen."""
    master: torch.Tensor
    master, _ = engine.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=True)
    return master


def _masters(optimizer: Any) -> Iterator[tuple[int, _Fragment]]:
    """This rank's fp32 weights of each parameter under ZeRO 1 and 2, by its `id`.

    A parameter is a view of a flat buffer: where it begins is seen, not computed. If the trial has
    given it other memory, there are none.
    """
    prefix, masters = _PARTITIONED[type(optimizer)]
    parts = (f"{prefix}_groups", f"{prefix}_groups_flat", masters, "real_dp_process_group")
    for parameters, flat, master, group in zip(
        *(getattr(optimizer, part) for part in parts), strict=True
    ):
        begin = dist.get_rank(group) * (flat.numel() // dist.get_world_size(group))
        for parameter in parameters:
            start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size() - begin
            first = max(start, 0)  # in the partition
            last = min(start + parameter.numel(), master.numel())
            if first < last and start + begin >= 0:
                yield id(parameter), (master[first:last], first - start)
            else:
                yield id(parameter), (master[:0], 0)


def _summed(tensors: Sequence[_Tensor]) -> list[list[int]]:
    """The `sums` of each tensor over its group. Collective: every rank calls this."""
    summed: dict[int, list[int]] = {}
    for group in {id(each.group): each.group for each in tensors}.values():
        members = [each for each in tensors if each.group is group]
        shares = [each.sums() for each in members]
        device = get_accelerator().current_device_name()
        total = torch.tensor([[0, 0, count] for *_, count in shares], device=device)
        for row, (bits, of_master, _) in zip(total, shares, strict=True):
            row[0], row[1] = bits, of_master
        dist.all_reduce(total, group=group)
        summed |= zip(map(id, members), total.tolist(), strict=True)
    return [summed[id(each)] for each in tensors]
