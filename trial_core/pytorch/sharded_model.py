"""Sharded models: torch's FSDP2, where each rank holds a part of every parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trial_core.errors import TrialError
from trial_core.pytorch.distributed_model import broadcast_model
from trial_core.rank.state_files.compiled_names import original

SHARDINGS = ("none", "fsdp2")
"""The values of ``optimizations.sharding`` and of `wrap_model`'s argument."""

# Where FSDP2 asks for the mean of float32 or bfloat16 gradients, CPU ranks get their sum before
# torch 2.9 (pytorch/pytorch#162338). Gradients of other types FSDP2 divides itself.
CPU_RANKS_ADD_UP = Version(torch.__version__) < Version("2.9")


def shard(model: nn.Module, mesh: DeviceMesh, compress: bool) -> None:
    """Divide a model's parameters among all ranks, in place. Collective: every rank calls this.

    The elements of the model's outermost ModuleLists and Sequentials are gathered one by one when
    they compute, and the rest of the model at once. The model is on this rank's device, and rank
    0's weights and buffers count. `mesh` has all ranks in one dimension. To `compress` is to send
    gradients as float16. Raises TrialError if the model has no forward pass.
    """
    if not _has_forward(model):
        raise TrialError(
            f"wrap_model cannot shard a {type(original(model)).__name__}, which has no forward "
            "method: FSDP2 gathers parameters when a module is called. Wrap a model that calls its "
            "parts"
        )
    broadcast_model(model)
    sent_as = torch.float16 if compress else torch.float64 if _adds_up(mesh) else None
    policy = MixedPrecisionPolicy(reduce_dtype=sent_as)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` has sharded the model, or a part of it."""
    return any(True for _ in _sharded_modules(model))


def mesh_shape(models: Iterable[nn.Module]) -> tuple[int, ...]:
    """The shape of the mesh of ranks that the models are sharded over; empty if none is sharded."""
    meshes = (
        each.device_mesh
        for model in models
        for each in sharded_parameters(model).values()
        if isinstance(each, DTensor)
    )
    return next((tuple(mesh.shape) for mesh in meshes), ())


def check_sharded_by_trial(model: nn.Module, ranks: int) -> None:
    """Check that a model that the trial has sharded itself is divided among all ranks, and that
    they average its gradients."""
    for name, each in sharded_parameters(model).items():
        if not isinstance(each, DTensor):
            continue
        if each.device_mesh.size() != ranks:
            raise TrialError(
                f"{type(model).__name__}'s parameter {name} is sharded over "
                f"{each.device_mesh.size()} of {ranks} ranks; pass fully_shard a device mesh of "
                "all ranks"
            )
        if _adds_up(each.device_mesh):
            raise TrialError(
                f"{type(model).__name__} is sharded over CPU ranks by fully_shard, with which "
                f"torch {torch.__version__} adds up gradients in place of their mean "
                "(pytorch/pytorch#162338); install torch 2.9 or newer, or have wrap_model shard "
                'the model: sharding="fsdp2"'
            )


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name, each as this rank's part."""
    reshard(model)
    return dict(model.named_parameters())


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without gradients has gathered and left so."""
    for module in _sharded_modules(model):
        module.reshard()


def _adds_up(mesh: DeviceMesh) -> bool:
    return CPU_RANKS_ADD_UP and mesh.device_type == "cpu" and mesh.size() > 1


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one: no other module uses their parameters, too."""
    uses = _uses(model)
    return [
        block
        for block in _elements(model)
        if (own := _uses(block)) and all(uses[each] == count for each, count in own.items())
    ]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists and Sequentials."""
    is_list = isinstance(original(module), (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if is_list and _has_forward(child):
            yield child
        else:
            yield from _elements(child)


def _has_forward(module: nn.Module) -> bool:
    return type(original(module)).forward is not nn.Module.forward


def _uses(module: nn.Module) -> Counter[int]:
    """How many names each parameter has."""
    return Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
