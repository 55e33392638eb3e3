"""An accelerator of DeepSpeed's own abstraction, whose memory is that of the CPU.

trialflow and DeepSpeed take their branches for devices, and the fake counts what these cost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from trial_core.rank.collectives import accelerator


class FakeAccelerator(CPU_Accelerator):
    """All tensors are on the device, except those that `pin_memory` returned.

    Attributes:
        pinned_bytes: the host memory pinned so far.
        can_pin: whether more can be pinned.
        rng: its generator's state.
        copies: what it does with copies to the host: "begun", "waited for".
        streams: for each copy its stream ("first", or the name of the thread that made the other)
            and the thread's device; "all" where all streams were waited for.
        entered: the thread's device at each entry of another stream.
        has_streams: whether others than the first one can be made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned_bytes = 0
        self.can_pin = True
        self.copies: list[str] = []
        self.streams: list[Any] = []
        self.entered: list[int] = []
        self.has_streams = True
        self._current = threading.local()
        self.rng = torch.zeros(1, dtype=torch.uint8)
        self._pinned: set[int] = set()

    def device_name(self, device_index: int | None = None) -> str:
        # Not "cpu", by which CPU ranks are known; but a device that torch knows.
        return "cpu:0" if device_index is None else "cpu"

    def device_count(self) -> int:
        return 1

    @property
    def Stream(self) -> Any:
        def made() -> _Stream:
            return _Stream(self, threading.current_thread().name)

        return made if self.has_streams else None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.entered.append(self.current_device())
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def current_stream(self, device_index: int | None = None) -> Any:
        return getattr(self._current, "stream", _Stream(self, "first"))

    def synchronize(self, device_index: int | None = None) -> None:
        self.streams.append("all")

    def set_device(self, device_index: int) -> None:
        self._current.device = device_index

    def current_device(self) -> int:
        return getattr(self._current, "device", 0)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self.rng

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self.rng = new_state

    def pin_memory(self, tensor: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
        if not self.can_pin:
            raise RuntimeError("CUDA error: out of memory")
        self.pinned_bytes += tensor.nbytes
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._pinned


class _Stream:
    """A stream, and the event of its last copy."""

    def __init__(self, fake: FakeAccelerator, name: str) -> None:
        self._fake, self._name = fake, name

    def record_event(self) -> _Stream:
        self._fake.copies.append("begun")
        self._fake.streams.append((self._name, self._fake.current_device()))
        return self

    def synchronize(self) -> None:
        self._fake.copies.append("waited for")


class Memory(TorchDispatchMode):
    """Inside the block, counts the memory that torch's operators allocate.

    Attributes:
        bytes: allocated in the block and not freed yet.
        peak_bytes: the most at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        known = {each.data_ptr() for each in _storages((arguments, options))} | self._counted
        result = operator(*arguments, **(options or {}))
        for storage in _storages(result):
            if storage.nbytes() and storage.data_ptr() not in known:
                self._allocated(storage)
        return result

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        address, count = storage.data_ptr(), storage.nbytes()
        self._counted.add(address)
        self.bytes += count
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._freed, address, count)

    def _freed(self, address: int, count: int) -> None:
        self._counted.discard(address)
        self.bytes -= count


def _storages(value: Any) -> list[torch.UntypedStorage]:
    found = []
    for each in torch.utils._pytree.tree_leaves(value):
        if isinstance(each, torch.Tensor) and each.device.type != "meta":
            found.append(each.untyped_storage())
        elif isinstance(each, torch.UntypedStorage):
            found.append(each)
    return found


@contextmanager
def fake_accelerator() -> Iterator[FakeAccelerator]:
    """Inside the block, this process computes on a fake accelerator."""
    before, fake = get_accelerator(), FakeAccelerator()
    set_accelerator(fake)
    _forget_memory_and_stream()
    try:
        yield fake
    finally:
        set_accelerator(before)
        _forget_memory_and_stream()


def _forget_memory_and_stream() -> None:
    accelerator.host_buffer.cache_clear()
    accelerator._second_stream.cache_clear()
