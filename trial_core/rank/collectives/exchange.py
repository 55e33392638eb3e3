"""Exchanges objects between ranks, with a deadline and the names of missing ranks.

Objects travel over a gloo process group. An exchange begins with one frame from every rank: the
name of the collective that it calls, and the beginning of its object. Most objects fit into the
frame, so an exchange is usually one collective; torch's object collectives need two, and
`monitored_barrier` names the missing ranks on rank 0 only.

Each rank also counts its exchanges in torch.distributed's store. The counts are read only when an
exchange has failed, to find the missing ranks.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.errors import DeadlineExceeded, SlotsError

# A frame's header: the length of the rank's object in bytes, and the name of its collective.
_HEADER = struct.Struct(">Q24s")
FRAME_BYTES = 4096
ROOM_BYTES = FRAME_BYTES - _HEADER.size

# A rank creates its exchanges in the order of the others, so a number means the same exchange on
# all its members.
_numbers = itertools.count()


class _Frame(NamedTuple):
    """The first message of a rank in an exchange; `beginning` is padded with zeros."""

    object_bytes: int
    collective: str
    beginning: bytes


class Exchange:
    """Exchanges objects between some ranks. Collective: every member creates it, no other rank.

    The first member gathers and broadcasts. `name` is the group's in error messages.

    Raises:
        DeadlineExceeded: a rank did not come in time. Every method raises this.
        SlotsError: a rank has died, or called another collective. Every method raises this.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, deadline_seconds: float) -> None:
        self._name = name
        self._ranks = list(ranks)
        self._rank = rank
        self._deadline_seconds = deadline_seconds
        self._count = 0
        self._store = _get_default_store()
        self._key = f"trialflow/{next(_numbers)}"
        with self._explaining_errors("connect"):
            self._group = dist.new_group(
                self._ranks,
                backend="gloo",
                timeout=timedelta(seconds=deadline_seconds),
                # Otherwise a rank that is not a member would split NCCL's communicator, alone.
                use_local_synchronization=True,
            )

    def allgather(self, collective: str, stuff: Any) -> list[Any]:
        """The `stuff` of all members, in their order; `collective` is its name in errors."""
        own = pickled(stuff)
        with self._explaining_errors(collective):
            frames = self._exchange_frames(collective, own)
            rests = self._all_gather(own[ROOM_BYTES:], _longest_rest(frames))
        return [_unpickle(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def gather(self, collective: str, stuff: Any) -> list[Any] | None:
        """The `stuff` of all members on the first one, None on the others."""
        own = pickled(stuff)
        with self._explaining_errors(collective):
            frames = self._exchange_frames(collective, own)
            size_bytes = _longest_rest(frames)
            sent = _tensor(own[ROOM_BYTES:], size_bytes)
            received = [torch.empty_like(sent) for _ in self._ranks] if self._is_first else None
            if size_bytes:
                dist.gather(sent, received, dst=self._ranks[0], group=self._group)
        if received is None:
            return None
        rests = map(_bytes, received)
        return [_unpickle(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def broadcast(self, collective: str, stuff: Any) -> Any:
        """The first member's `stuff`."""
        own = pickled(stuff) if self._is_first else b""
        with self._explaining_errors(collective):
            frames = self._exchange_frames(collective, own)
            size_bytes = _longest_rest(frames)
            rest = _tensor(own[ROOM_BYTES:], size_bytes)
            if size_bytes:
                dist.broadcast(rest, src=self._ranks[0], group=self._group)
        return stuff if self._is_first else _unpickle(frames[0], _bytes(rest))

    # ------------------------------------------------------------------------ over the group

    @property
    def _is_first(self) -> bool:
        return self._rank == self._ranks[0]

    def _exchange_frames(self, collective: str, own: bytes) -> list[_Frame]:
        """The frames of all members.

        Raises:
            SlotsError: a rank calls another collective. All ranks raise, so none misreads data.
        """
        own_frame = _HEADER.pack(len(own), collective.encode()) + own[:ROOM_BYTES]
        frames = []
        for data in self._all_gather(own_frame, FRAME_BYTES):
            object_bytes, name = _HEADER.unpack_from(data)
            frames.append(_Frame(object_bytes, name.rstrip(b"\0").decode(), data[_HEADER.size :]))
        others = [
            f"rank {rank} called {frame.collective} instead"
            for rank, frame in zip(self._ranks, frames, strict=True)
            if frame.collective != collective
        ]
        if others:
            raise SlotsError(
                f"{self._describe(collective)}: {'; '.join(others)}. Every rank must call the same "
                "collectives in the same order"
            )
        return frames

    def _all_gather(self, own: bytes, size_bytes: int) -> list[bytes]:
        """The bytes of all members, padded to `size_bytes`; no collective if that is 0."""
        sent = _tensor(own, size_bytes)
        received = [torch.empty_like(sent) for _ in self._ranks]
        if size_bytes:
            dist.all_gather(received, sent, group=self._group)
        return [_bytes(tensor) for tensor in received]

    # -------------------------------------------------------------------------------- errors

    @contextmanager
    def _explaining_errors(self, collective: str) -> Iterator[None]:
        began = time.monotonic()
        self._count += 1
        try:
            self._store.set(f"{self._key}/{self._rank}", str(self._count))
            yield
        except RuntimeError as error:  # gloo and the store raise it for every failure
            seconds = time.monotonic() - began
            raise self._explained(collective, seconds, error) from error

    def _explained(self, collective: str, seconds: float, error: RuntimeError) -> SlotsError:
        try:
            cause = self._missing_ranks()
        except RuntimeError:
            cause = "rank 0, which hosts the ranks' store, is gone"
        where = self._describe(collective)
        # gloo measures a deadline with its own clock, so it may seem a little shorter here.
        if seconds < 0.9 * self._deadline_seconds:
            return SlotsError(f"{where} failed after {seconds:.1f} s: {cause}; {error}")
        return DeadlineExceeded(
            f"{where} waited {self._deadline_seconds:g} s: {cause}. Every rank must call the same "
            "collectives in the same order; if one may take longer, set "
            "TRIALFLOW_COLLECTIVE_SECONDS"
        )

    def _describe(self, collective: str) -> str:
        return f"context.distributed.{collective} ({self._name}) on rank {self._rank}"

    def _missing_ranks(self) -> str:
        missing = [str(rank) for rank in self._ranks if self._count_of(rank) < self._count]
        return f"rank {', '.join(missing)} did not come" if missing else "all ranks had come"

    def _count_of(self, rank: int) -> int:
        """How many exchanges a rank has begun."""
        key = f"{self._key}/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _longest_rest(frames: Sequence[_Frame]) -> int:
    return max(0, max(frame.object_bytes for frame in frames) - ROOM_BYTES)


def _unpickle(frame: _Frame, rest: bytes) -> Any:
    return pickle.loads((frame.beginning + rest)[: frame.object_bytes])


def _tensor(data: bytes, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)  # `frombuffer` refuses an empty buffer
    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def pickled(stuff: Any) -> bytes:
    """`stuff` as bytes, from which its tensors arrive on the CPU. Waits for its accelerators.

    A plain pickle of a tensor names its device. A process that reads it would create a context on
    that device, which is another rank's: each takes hundreds of MiB of its memory.
    """
    file = io.BytesIO()
    _Pickler(file).dump(stuff)
    return file.getvalue()


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
