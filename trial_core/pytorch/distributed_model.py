"""Data-parallel models: torch's DistributedDataParallel, and the buffers of its replicas."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# `broadcast_buffers` is deprecated where `forward_sync_buffers` exists (torch 2.13).
_KEEPS_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class DistributedModel(DistributedDataParallel):
    """A replica of a model on this rank. Attributes and methods of the model pass through.

    Constructing it is collective. Only a forward pass that trains is DistributedDataParallel's: in
    evaluation mode, or without gradients, a rank may call the model as often as it likes.

    Attributes:
        forwards: forward passes that train, which will be averaged over ranks.
    """

    def __init__(self, module: nn.Module, device: torch.device, **options: Any) -> None:
        devices = None if device.type == "cpu" else [device]
        super().__init__(module, device_ids=devices, **_KEEPS_BUFFERS, **options)
        self.forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, averaging gradients in the backward pass of training."""
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        self.forwards += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose parameters have the same names with one rank and with many."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def broadcast_buffers(models: Iterable[nn.Module]) -> None:
    """Give every rank rank 0's buffers, such as running means. Collective."""
    broadcast([buffer for model in models for buffer in model.buffers()])


def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank rank 0's values. Collective."""
    for flat, parts in _flattened(tensors):
        dist.broadcast(flat, 0)
        _copy_back(flat, parts)


def average(tensors: Sequence[torch.Tensor], ranks: int, compress: bool) -> None:
    """Replace each tensor by its mean over all ranks. Collective.

    Args:
        compress: whether to send values as float16.
    """
    for flat, parts in _flattened(tensors):
        flat.div_(ranks)
        sent = flat.half() if compress and flat.is_floating_point() else flat
        dist.all_reduce(sent)
        _copy_back(sent, parts)


BUCKET_BYTES = 25 * 2**20
"""How much one collective sends: as DistributedDataParallel."""


def _flattened(
    tensors: Sequence[torch.Tensor],
) -> Iterable[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Buckets of tensors of one type and device, each as one flat copy."""
    by_kind = sorted(tensors, key=lambda tensor: f"{tensor.dtype} {tensor.device}")
    for _, same in groupby(by_kind, key=lambda tensor: (tensor.dtype, tensor.device)):
        for bucket in _buckets(same):
            yield torch.cat([tensor.detach().reshape(-1) for tensor in bucket]), bucket


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        bucket.append(tensor)
        size_bytes += tensor.nbytes
        if size_bytes >= BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = [], 0
    if bucket:
        yield bucket


@torch.no_grad()
def _copy_back(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    sizes = [part.numel() for part in parts]
    for part, values in zip(parts, torch.split(flat, sizes), strict=True):
        part.copy_(values.view_as(part))
