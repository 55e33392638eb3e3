"""The bytes of a tensor's storage: on the host piece by piece, and samples of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trial_core.rank.collectives.accelerator import CopyToHost, host_buffer, is_on_accelerator

Bytes = NDArray[np.uint8]

_PIECE_BYTES = 32 * 2**20
_host_buffer_lock = threading.Lock()


def on_host(storage: torch.UntypedStorage) -> Iterator[Bytes]:
    """The bytes of a storage, in order. A piece is valid until the next one is asked for.

    Those of an accelerator come through two halves of one pinned buffer, in whose order this
    thread's stream has them: one half is filled while the caller reads the other one.
    """
    content = _content(storage)
    if not is_on_accelerator(content):
        whole = content.cpu().untyped_storage()
        for begin in range(0, whole.nbytes(), _PIECE_BYTES):
            yield _memory(whole)[begin : begin + _PIECE_BYTES]
        return
    with _host_buffer_lock:
        halves = host_buffer().chunk(2)
        pieces = torch.split(content, halves[0].numel())
        begun = CopyToHost(pieces[0], halves[0])
        for index, piece in enumerate(pieces[1:], start=1):
            finished, begun = begun, CopyToHost(piece, halves[index % 2])
            yield finished.data()
        yield begun.data()


def sampled(storage: torch.UntypedStorage, places: NDArray[np.int64]) -> torch.Tensor:
    """The bytes at some places of a storage, on its device."""
    content = _content(storage)
    if not is_on_accelerator(content):
        return torch.from_numpy(_memory(storage)[places])
    return content.index_select(0, torch.from_numpy(places).to(content.device))


def copy_by_threads(data: memoryview, room: memoryview) -> None:
    """Copy bytes by as many threads as torch may use. With one, an assignment is faster."""
    torch.frombuffer(room, dtype=torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))


def _content(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: torch.UntypedStorage) -> Bytes:
    """The memory of a storage on the CPU, valid while the storage is alive and not resized."""
    # Not by `Tensor.numpy`, which makes a storage impossible to resize.
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memory, np.uint8)
