"""Data-parallel models: torch's DistributedDataParallel, and the buffers of its replicas."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trial_core.errors import TrialError
from trial_core.rank.state_files.compiled_names import name_as_uncompiled, original

logger = logging.getLogger(__name__)

# `broadcast_buffers` is deprecated where `forward_sync_buffers` exists (torch 2.13).
_KEEPS_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class DistributedModel(DistributedDataParallel):
    """A replica of a model on this rank. The model's attributes are read, and set, through it.

    Constructing it is collective. Only a forward pass that trains is DistributedDataParallel's:
    `forwards` counts them. In evaluation mode, or without gradients, a rank may call the model as
    often as it likes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        devices = None if device.type == "cpu" else [device]
        super().__init__(module, device_ids=devices, **_KEEPS_BUFFERS)
        self.forwards = 0
        hidden = sorted(
            name
            for name in set(dir(self)) & set(dir(module)) - set(dir(nn.Module()))
            if not name.startswith("_") and repr(getattr(self, name)) != repr(getattr(module, name))
        )
        if hidden:
            logger.warning(
                f"{type(module).__name__} has attributes with names of DistributedDataParallel's "
                f"own, which hide them from the result of wrap_model: {', '.join(hidden)}. Rename "
                "them, or keep the model that you pass to wrap_model and use its attributes"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own, but averages gradients in the backward pass of training."""
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        self.check_all_averaged()
        self.forwards += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def check_all_averaged(self) -> None:
        """Check that the last backward pass has averaged the gradients of all parameters.

        Raises TrialError if one got no gradient: ranks would train different weights.
        """
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise pass_error(type(self.module).__name__, "did not reach all parameters") from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "forwards" in own and name not in own and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


class DistributedContainer(DistributedModel):
    """A replica of a model that is a container, such as `torch.nn.Sequential`, and is read as one.

    Python looks up the methods of operators in the class, not by `__getattr__`. Replicas of other
    models do not have them: each would count as iterable.
    """

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __contains__(self, item: Any) -> bool:
        return item in self.module

    def __bool__(self) -> bool:
        return bool(self.module)


_OF_CONTAINERS = ("__getitem__", "__len__", "__iter__", "__contains__")


def replica_of(module: nn.Module, device: torch.device) -> DistributedModel:
    """A model's replica on this rank. Collective."""
    is_container = any(hasattr(type(original(module)), name) for name in _OF_CONTAINERS)
    return (DistributedContainer if is_container else DistributedModel)(module, device)


def pass_error(model: str, seen: str) -> TrialError:
    """The error for a backward pass that DistributedDataParallel cannot average."""
    return TrialError(
        f"a backward pass of {model} {seen}, and each one must give every parameter one gradient: "
        "ranks average gradients while it runs. Have them averaged in step_optimizer instead: call "
        "context.wrap_model(model, find_unused_parameters=True)"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose parameters have the same names with one rank and with many, and if
    it is compiled, or a part of it, which may be at any time."""
    itself = model.module if isinstance(model, DistributedDataParallel) else model
    name_as_uncompiled(itself)
    return itself


def broadcast_buffers(models: Iterable[nn.Module]) -> None:
    """Give every rank rank 0's buffers, such as running means. Collective."""
    _broadcast([buffer for model in models for buffer in model.buffers()])


def broadcast_model(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers of a model. Collective."""
    _broadcast([*model.parameters(), *model.buffers()])


def average(tensors: Sequence[torch.Tensor], ranks: int, compress: bool) -> None:
    """Replace each tensor by its mean over all ranks, perhaps sent as float16. Collective."""

    def mean(flat: torch.Tensor) -> torch.Tensor:
        flat.div_(ranks)
        sent = flat.half() if compress and flat.is_floating_point() else flat
        dist.all_reduce(sent)
        return sent

    _exchange(tensors, mean)


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    def of_rank_0(flat: torch.Tensor) -> torch.Tensor:
        dist.broadcast(flat, 0)
        return flat

    _exchange(tensors, of_rank_0)


BUCKET_BYTES = 25 * 2**20
"""How much one collective sends: as much as DistributedDataParallel."""


@torch.no_grad()
def _exchange(
    tensors: Sequence[torch.Tensor], exchanged: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace tensors by what `exchanged` returns for many of them, end to end."""
    utils: Any = torch._utils  # untyped
    for bucket in utils._take_tensors(tensors, BUCKET_BYTES):
        flat = exchanged(utils._flatten_dense_tensors(bucket))
        for part, values in zip(bucket, utils._unflatten_dense_tensors(flat, bucket), strict=True):
            part.copy_(values)
