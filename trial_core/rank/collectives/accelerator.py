"""The accelerator that a rank computes on: its generators, and how its memory reaches the host."""

from __future__ import annotations

import functools
import logging
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from numpy.typing import NDArray

from trial_core.common.text_format import plural
from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import ADVICE, KIND_VARIABLE, count_accelerators

logger = logging.getLogger(__name__)

HOST_BUFFER_BYTES = 256 * 2**20
"""A power of two: torch rounds pinned memory up to one."""


def claim_accelerator(local_rank: int) -> None:
    """Make the machine's accelerator number `local_rank` this rank's current one.

    Call before anything is put on a device. The current one is number 0 on every rank by default,
    and DeepSpeed sets it only when it builds an engine. Does nothing on a CPU rank. Raises
    LaunchError if torch finds no such accelerator; or the machine has some, and this rank would
    train on the CPU without being told to.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed uses it silently. A driver has checked this before it starts ranks, and has told
        # them which kind to use.
        if count := count_accelerators():
            raise LaunchError(
                f"this machine has {plural(count, 'accelerator')}, but torch "
                f"{torch.__version__} can use none of them{_reason()}; install a torch build for "
                "this machine's driver (docs/guides/gpu.md); to train on the CPU, set the "
                f"environment variable {KIND_VARIABLE}=cpu"
            )
        return
    count = accelerator.device_count() if accelerator.is_available() else 0
    wanted = f"this rank should train on {accelerator.device_name()} device {local_rank}"
    if count == 0:
        raise LaunchError(
            f"{wanted}, but torch {torch.__version__} finds none{_reason()}; install a torch build "
            f"for this machine's driver (docs/guides/gpu.md); {ADVICE}"
        )
    if local_rank >= count:
        raise LaunchError(
            f"{wanted}, but only {count} of them can be seen: start at most {count} ranks on this "
            "machine, or show each rank all devices (CUDA_VISIBLE_DEVICES)"
        )
    accelerator.set_device(local_rank)


def _reason() -> str:
    """Why CUDA finds no device, if it says so."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f": {error}"
    return ""


def has_accelerator() -> bool:
    """Return whether this rank computes on an accelerator, not on the CPU."""
    return bool(get_accelerator().device_name() != "cpu")


def accelerator_name() -> str:
    """The name of this rank's accelerator, such as ``NVIDIA H100 80GB HBM3``; empty without one,
    and before anything was put on it: asking would initialise it."""
    device = _device_in_use()
    return "" if device is None else str(getattr(device, "get_device_name", str)())


_EARLIER_PEAKS = [0]


def peak_memory_bytes(since_start: bool = True) -> int:
    """The most memory of its accelerator that torch has allocated; on the CPU, of this process.

    If not `since_start` of the process, since `reset_peak_memory`, which has no effect on the CPU.
    """
    device = _device_in_use()
    if device is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    now = int(get_accelerator().max_memory_allocated())
    return max(now, *_EARLIER_PEAKS) if since_start else now


def reset_peak_memory() -> None:
    """Begin a new measurement of `peak_memory_bytes`; the earlier peak is kept."""
    if _device_in_use() is not None:
        _EARLIER_PEAKS[0] = peak_memory_bytes()
        get_accelerator().reset_peak_memory_stats()


def _device_in_use() -> Any:
    """torch's module for this rank's accelerator, or None before its first use."""
    if not has_accelerator() or not torch.accelerator.is_available():
        return None
    device = torch.get_device_module()
    return device if getattr(device, "is_initialized", lambda: True)() else None


def accelerator_rng_state() -> dict[str, Any]:
    """The states of this rank's generators on its accelerator; empty on most CPU ranks.

    ``accelerator`` is the state of its own generator. ``tracked`` are the states, by name, that
    DeepSpeed's activation checkpointing tracks: the generator takes one of them for a region of a
    model, such as dropout that differs between model-parallel ranks.
    """
    tracked = get_cuda_rng_tracker().get_states()
    states: dict[str, Any] = {"tracked": tracked} if tracked else {}
    if has_accelerator():
        states["accelerator"] = get_accelerator().get_rng_state()
    return states


def restore_accelerator_rng(states: Mapping[str, Any]) -> None:
    """Restore the `states` of `accelerator_rng_state`, as far as this rank can have them."""
    if "tracked" in states:
        get_cuda_rng_tracker().set_states(dict(states["tracked"]))
    if "accelerator" in states and has_accelerator():
        get_accelerator().set_rng_state(states["accelerator"])


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    return has_accelerator() and bool(get_accelerator().on_accelerator(tensor))


def wait_for_accelerator() -> None:
    """Wait until this rank's accelerator has done all that it was given, on all of its streams."""
    if has_accelerator():
        get_accelerator().synchronize()


def has_streams() -> bool:
    return get_accelerator().Stream is not None


def beside_training() -> AbstractContextManager[Any]:
    """Inside the block, what its thread gives the accelerator is done on a second stream.

    That stream waits for no other one: see `wait_for_accelerator`. Call this on the thread that
    trains, whose device it takes: another thread begins with the machine's first, where even asking
    for its stream takes memory.
    """
    if not has_accelerator() or not has_streams():
        return nullcontext()
    return _on_stream(_second_stream(), get_accelerator().current_device())


@contextmanager
def _on_stream(stream: Any, device_index: int) -> Iterator[None]:
    get_accelerator().set_device(device_index)
    with get_accelerator().stream(stream):
        yield


@functools.cache
def _second_stream() -> Any:
    return get_accelerator().Stream()


@functools.cache
def host_buffer() -> torch.Tensor:
    """Bytes on the host, through which memory of the accelerator is copied: pinned if possible,
    which is faster. One per process."""
    buffer = torch.empty(HOST_BUFFER_BYTES, dtype=torch.uint8)
    try:
        return cast(torch.Tensor, get_accelerator().pin_memory(buffer))
    except RuntimeError as error:
        logger.warning(
            "cannot pin %d MiB of host memory, so snapshots take longer: %s; raise the limit of "
            "locked memory (ulimit -l) or of the container's memory",
            HOST_BUFFER_BYTES // 2**20, error,
        )  # fmt: skip
        return buffer


class CopyToHost:
    """Bytes that an accelerator copies to the host after all work that it was given before.

    Args:
        source: on the accelerator, one-dimensional, of bytes. It stays as it is until `data`.
        buffer: on the host, at least as long. Of pageable memory, the copy ends here already.
    """

    def __init__(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        # Of its own device: a tensor may be on another one than the rank's.
        stream = get_accelerator().current_stream(source.device.index)
        self._on_host = buffer[: source.numel()].copy_(source, non_blocking=stream is not None)
        self._end = None if stream is None else stream.record_event()

    def data(self) -> NDArray[np.uint8]:
        """Wait for the copy, and return its bytes in the buffer."""
        if self._end is not None:
            self._end.synchronize()
        return self._on_host.numpy()
