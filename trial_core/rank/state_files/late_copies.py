"""Copies of a snapshot that are made while training continues, before anything changes the source.

Nothing changes weights and an optimizer's state between two of its steps. So a save only reserves
room for them in its memory files; a thread copies them while the next batch computes, on a stream
of its own from an accelerator, and the first step of an optimizer waits for the rest. What else
writes to them calls `finish_copies` before.

A trial may write to them unseen. So the first snapshot is copied at once, and compared with its
source before the next step: if they differ, all others are copied at once, too. Later, versions of
the tensors tell, and samples of what has none: that snapshot is not stored, and the others are
copied at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trial_core.common.text_format import first_few
from trial_core.errors import WeightsChanged
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.collectives.accelerator import (
    beside_training,
    has_accelerator,
    has_streams,
    wait_for_accelerator,
)
from trial_core.rank.state_files.state_guard import has_bits
from trial_core.rank.state_files.storage_bytes import on_host, sampled

_SAMPLE_BYTES = 8
_SAMPLED_BYTES = 64 * 2**10
"""There is a sample in so many bytes of a storage, and three of each tensor in it."""
_CHANGES = "the trial changes weights between a save and a step of an optimizer"

logger = logging.getLogger(__name__)


class _Changed(Exception):
    """A tensor was written to between the save and the copy."""


class _Watched:
    """A storage that must not change, and the tensors that are known to be in it.

    Attributes:
        is_compared: True once `fill` is to compare: the storage may have several copies.
    """

    def __init__(self, storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> None:
        self._storage = storage  # stays alive
        self._places = _sampled_places(storage, tensors)
        self._samples = sampled(storage, self._places)
        self._versions = [(each, each._version) for each in tensors]
        self.is_compared = False

    def fill(self, room: memoryview) -> None:
        """Copy the content, or compare it with its copy. Raises `_Changed` if it has changed."""
        target, end, is_same = np.frombuffer(room, np.uint8), 0, True
        for piece in on_host(self._storage):
            begin, end = end, end + len(piece)
            if self.is_compared:
                is_same = is_same and np.array_equal(target[begin:end], piece)
            else:
                np.copyto(target[begin:end], piece)  # lets other threads run
        is_same = is_same and self._are_samples(target[self._places])
        del target  # the room cannot be given back while an array has it
        if not is_same:
            raise _Changed

    def check(self) -> None:
        """Raises `_Changed` if it was written to since."""
        is_same = self._are_samples(sampled(self._storage, self._places).cpu().numpy())
        if not is_same or any(each._version != version for each, version in self._versions):
            raise _Changed

    def _are_samples(self, seen: NDArray[np.uint8]) -> bool:
        return np.array_equal(seen, self._samples.cpu().numpy())


def _sampled_places(
    storage: torch.UntypedStorage, tensors: Iterable[torch.Tensor]
) -> NDArray[np.int64]:
    """The indices of the bytes that are compared."""
    whole, begins = storage.nbytes(), [storage.nbytes() - _SAMPLE_BYTES]
    for each in tensors:
        if (size := each.nbytes) < whole:
            first = each.data_ptr() - storage.data_ptr()
            begins += [first, first + size // 2, first + size - _SAMPLE_BYTES]
    starts = np.concatenate([np.arange(0, whole, _SAMPLED_BYTES), begins])
    return (starts[:, None] + np.arange(_SAMPLE_BYTES)).clip(0, whole - 1).ravel()


class LateCopies:
    """The copies of this rank's last snapshot that are made late.

    Attributes:
        waited_seconds: how long training has waited for copies in all.
        why_not: why copies cannot be made late, as earlier ones have shown; empty if they can.
        why_unproven: what has kept `prove` from learning that they can; empty if nothing has.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self.why_not = self.why_unproven = ""
        self._is_proven = False
        self._unproven: tuple[Sequence[Callable[[], None]], Sequence[_Watched]] | None = None
        self._unchanged: dict[_Place, list[torch.Tensor]] = {}
        self._watched: dict[_Place, _Watched] = {}
        self._later: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._failure: WeightsChanged | None = None

    def begin_save(self) -> None:
        """Wait until the last save is complete, and forget whether it was."""
        finish_copies()
        self._failure = None

    @contextmanager
    def collected(
        self, memory: MemoryFiles, optimizers: Sequence[Any], modules: Iterable[torch.nn.Module]
    ) -> Iterator[None]:
        """Inside the block, `write_tensors` leaves the copy of tensors to a thread where it can.

        These are what `optimizers` change: parameters of `modules` that are trained, and states.
        """
        _finish_before_steps()
        wait_for_accelerator()  # other streams of it may still write what was computed
        self._unchanged = defaultdict(list)
        for each in _changed_by_steps(optimizers, modules):
            if has_bits(each) and each.untyped_storage().data_ptr():
                self._unchanged[_place(each.untyped_storage())].append(each)
        _collecting.append(self)
        try:
            yield
            copies, later = memory.take_reserved(), self._later
            watched = [*self._watched.values()]
        finally:
            _collecting.remove(self)
            self._unchanged, self._watched, self._later = {}, {}, []
        wait_for_accelerator()  # the thread's stream waits for no other one
        self._thread = threading.Thread(
            target=self._do,
            args=[[*copies, *later], watched, beside_training()],
            name="snapshot",
            daemon=True,
        )
        self._thread.start()
        if not self._is_proven:
            self._thread.join()
            self._unproven = None if self._failure else (copies, watched)
        _pending.append(self)

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage's copy can be left to the thread."""
        is_readable = storage.device.type == "cpu" or has_accelerator()
        return is_readable and _place(storage) in self._unchanged

    def copy_of(self, storage: torch.UntypedStorage) -> Callable[[memoryview], None]:
        """What copies a storage that `takes` has accepted."""
        return self._watch(storage).fill

    def later(self, work: Callable[[], None], tensors: Iterable[torch.Tensor]) -> None:
        """Have the thread do some more, which reads `tensors`."""
        for each in tensors:
            self._watch(each.untyped_storage())
        self._later.append(work)

    def finish(self) -> None:
        """Wait until all is copied. For any thread."""
        if self._thread is not None:
            self._thread.join()

    def prove(self, hook: str, is_step: bool) -> None:
        """Learn from the first snapshot whether a trial changes weights by steps alone.

        Nothing can be learned if something else follows than a step. See `finish_copies`.
        """
        unproven, self._unproven = self._unproven, None
        if unproven is None:
            return
        if not is_step:
            if hook:
                self.why_unproven = f"{hook} came between the last save and the next batch"
            return
        copies, watched = unproven
        try:
            for storage in watched:
                storage.check()
                storage.is_compared = True
            for compare in copies:
                compare()
            self._is_proven, self.why_unproven = True, ""
        except _Changed:
            self.why_not = _CHANGES
            logger.warning("snapshots are copied before training continues: %s", self.why_not)
        except RuntimeError as error:  # of an accelerator: the snapshot itself is complete
            self.why_not = f"a copy could not be compared: {error}"
            logger.warning("snapshots are copied before training continues: %s", self.why_not)

    def require_complete(self) -> None:
        """Wait until all is copied. Raises WeightsChanged if the copies are not of the save."""
        self.finish()
        if self._failure is not None:
            raise self._failure

    def _watch(self, storage: torch.UntypedStorage) -> _Watched:
        place = _place(storage)
        if place not in self._watched:
            self._watched[place] = _Watched(storage, self._unchanged.get(place, []))
        return self._watched[place]

    def _do(
        self,
        work: Sequence[Callable[[], None]],
        watched: Sequence[_Watched],
        beside: AbstractContextManager[Any],
    ) -> None:
        try:
            with beside:
                for each in work:
                    each()
                for storage in watched:
                    storage.check()
        except _Changed:
            self.why_not = _CHANGES
            self._failure = WeightsChanged(
                "the trial has changed weights after the save and before the next step of an "
                "optimizer, while they were copied"
            )
        except Exception as error:  # noqa: BLE001  # told by `require_complete`
            self.why_not = f"a late copy has failed: {type(error).__name__}: {error}"
            self._failure = WeightsChanged(self.why_not)


_Place = tuple[torch.device, int]


def _place(storage: torch.UntypedStorage) -> _Place:
    """Where a storage begins."""
    return storage.device, storage.data_ptr()


_collecting: list[LateCopies] = []
_pending: list[LateCopies] = []


def collecting() -> LateCopies | None:
    """Those that a save collects now."""
    return _collecting[-1] if _collecting else None


def finish_copies(hook: str = "", is_step: bool = False) -> None:
    """Wait until all late copies are made: call it before something writes to weights.

    Args:
        hook: the callbacks' hook that follows, if one does.
        is_step: whether a step of an optimizer is what follows.
    """
    for late in [*_pending]:
        began = time.monotonic()
        late.finish()
        late.prove(hook, is_step)
        late.waited_seconds += time.monotonic() - began
        with suppress(ValueError):  # another thread has waited, too
            _pending.remove(late)


def why_not_late(optimizers: Sequence[Any], with_modes: Sequence[Any]) -> str:
    """Why copies cannot be made late; empty if they can.

    Args:
        with_modes: those of the optimizers that have modes for training and evaluation.
    """
    if has_accelerator() and not has_streams():
        return "copies cannot be made beside training on this kind of accelerator"
    if not optimizers:
        return "the trial has no optimizer"
    silent = {type(each).__name__ for each in optimizers if not _tells_its_steps(each)}
    if silent:
        return (
            f"torch does not tell when {first_few(sorted(silent))} steps, which is not derived "
            "from torch.optim.Optimizer"
        )
    if with_modes:
        return f"{type(with_modes[0]).__name__} exchanges weights for a validation and a save"
    if any("muon" in type(each).__name__.lower() for each in optimizers):
        return "DeepSpeed changes the state of Muon before its step"
    return ""


@cache
def _finish_before_steps() -> None:
    register_optimizer_step_pre_hook(lambda *_: finish_copies(is_step=True))


def _tells_its_steps(optimizer: Any) -> bool:
    """True if torch calls hooks before each step of an optimizer, whoever derives its class."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _changed_by_steps(
    optimizers: Iterable[Any], modules: Iterable[torch.nn.Module]
) -> Iterator[torch.Tensor]:
    """On this rank: of a tensor that is divided over ranks, the part that is here."""
    for each in _whole_tensors_changed_by_steps(optimizers, modules):
        yield each.to_local() if isinstance(each, DTensor) else each


def _whole_tensors_changed_by_steps(
    optimizers: Iterable[Any], modules: Iterable[torch.nn.Module]
) -> Iterator[torch.Tensor]:
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
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
