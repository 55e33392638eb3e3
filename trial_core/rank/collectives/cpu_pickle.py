"""Pickles objects of any class, so that their tensors arrive on the CPU.

A plain pickle of a tensor names its device. A process that reads it would create a context on that
device, which is another rank's: each takes hundreds of MiB of its memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(stuff: Any) -> bytes:
    """`stuff` as bytes. Waits for the accelerators that hold its tensors."""
    file = io.BytesIO()
    _Pickler(file).dump(stuff)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The object that `dumps` turned into `data`; its tensors are on the CPU."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor's memory is pickled; all other objects are pickled as usual."""
        if not isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            return NotImplemented
        file = io.BytesIO()
        torch.save(value, file)
        return _storage_on_cpu, (file.getvalue(),)


def _storage_on_cpu(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
