"""Copies of a snapshot that are made while training continues, before anything changes the source.

Nothing changes weights and an optimizer's state between two of its steps. So a save only reserves
room for them in its memory files; a thread copies them while the next batch computes, and the first
step of an optimizer waits for the rest. What else writes to them calls `finish` before. A trial may
write to them in a way that cannot be seen: samples of each tensor, taken at the save, tell.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trial_core.common.text_format import first_few
from trial_core.errors import CheckpointRefused
from trial_core.processes.machine.memory_files import MemoryFiles

logger = logging.getLogger(__name__)

_SAMPLES = 32
_PIECE_BYTES = 32 * 2**20


class _Changed(Exception):
    """A tensor was written to between the save and the copy."""


class LateCopies:
    """The copies of this rank's last snapshot that are made late.

    Attributes:
        waited_seconds: how long training has waited for copies in all.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._unchanged: set[int] = set()
        self._later: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_eager = False

    @contextmanager
    def collected(
        self, memory: MemoryFiles, optimizers: Sequence[Any], modules: Iterable[torch.nn.Module]
    ) -> Iterator[None]:
        """Inside the block, `write_tensors` leaves the copy of tensors to a thread where it can.

        These are the parameters of `modules`, and what `optimizers` change, if every step of each
        of them can be seen.
        """
        self._failure = None
        silent = {type(each).__name__ for each in optimizers if not _tells_its_steps(each)}
        if silent and not self._is_eager:
            logger.warning(
                "weights are copied before training continues, as with checkpointing.snapshot: "
                "eager: torch does not tell when %s steps; derive it from torch.optim.Optimizer",
                first_few(sorted(silent)),
            )
        self._is_eager |= bool(silent)
        if self._is_eager or not optimizers:
            yield
            return
        _finish_before_steps()
        self._unchanged = {_memory(each) for each in _changed_by_steps(optimizers, modules)} - {0}
        _collecting.append(self)
        try:
            yield
            work = [*memory.take_reserved(), *self._later]
        finally:
            _collecting.remove(self)
            self._unchanged, self._later = set(), []
        self._thread = threading.Thread(target=self._do, args=[work], name="snapshot", daemon=True)
        _pending.append(self)
        self._thread.start()

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage's copy can be left to the thread."""
        return storage.device.type == "cpu" and storage.data_ptr() in self._unchanged

    def later(self, work: Callable[[], None]) -> None:
        """Have the thread do some more, which reads weights."""
        self._later.append(work)

    def finish(self) -> None:
        """Wait until all is copied. For any thread."""
        if self._thread is not None:
            self._thread.join()

    def require_complete(self) -> None:
        """Wait until all is copied. Raises CheckpointRefused if the copies are not of the save."""
        self.finish()
        if self._failure is not None:
            raise CheckpointRefused(str(self._failure))

    def _do(self, work: Sequence[Callable[[], None]]) -> None:
        try:
            for each in work:
                each()
        except _Changed:
            self._is_eager = True
            self._failure = CheckpointRefused(
                "the trial has changed weights after the save and before the next step of an "
                "optimizer, while they were copied; the next checkpoints are copied before "
                "training continues, as with checkpointing.snapshot: eager"
            )
        except Exception as error:  # noqa: BLE001  # told by `require_complete`
            self._failure = error


_collecting: list[LateCopies] = []
_pending: list[LateCopies] = []


def collecting() -> LateCopies | None:
    """Those that a save collects now."""
    return _collecting[-1] if _collecting else None


def finish_copies(*_: object) -> None:
    """Wait until all late copies are made: call it before something writes to weights."""
    for late in [*_pending]:
        began = time.monotonic()
        late.finish()
        late.waited_seconds += time.monotonic() - began
        with suppress(ValueError):  # another thread has waited, too
            _pending.remove(late)


def late_copy(storage: torch.UntypedStorage) -> Callable[[memoryview], None]:
    """Note samples of a storage; returns what copies it. That raises if they have changed."""
    source: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    places = np.linspace(0, len(source) - 1, min(_SAMPLES, len(source))).astype(np.int64)
    saved = source[places]

    def copy(room: memoryview) -> None:
        target = np.frombuffer(room, np.uint8)
        for begin in range(0, len(target), _PIECE_BYTES):
            piece = slice(begin, begin + _PIECE_BYTES)
            np.copyto(target[piece], source[piece])  # lets other threads run
        if not (target[places] == saved).all() or not (source[places] == saved).all():
            raise _Changed

    return copy


@cache
def _finish_before_steps() -> None:
    register_optimizer_step_pre_hook(finish_copies)


def _tells_its_steps(optimizer: Any) -> bool:
    """True if torch calls hooks before each step of an optimizer, whoever derives its class."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _changed_by_steps(
    optimizers: Iterable[Any], modules: Iterable[torch.nn.Module]
) -> Iterator[torch.Tensor]:
    for module in modules:
        for parameter in module.parameters():
            yield parameter
            if (part := getattr(parameter, "ds_tensor", None)) is not None:  # of ZeRO 3
                yield part
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for parameter, values in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                yield parameter
            for value in values.values() if isinstance(values, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield value


def _memory(tensor: torch.Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage().data_ptr()
