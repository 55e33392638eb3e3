"""Objects exchanged between some ranks, with a deadline, and a name for whoever did not come.

The objects travel over a gloo group. Each exchange begins with one small frame from every rank,
which says what that rank calls; nearly all objects fit into it. Beside the group each rank notes in
torch.distributed's store how many exchanges it has come to: one small message, which is read only
when an exchange has failed.
"""

from __future__ import annotations

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

# What a frame begins with: the length of the rank's object in bytes, and what the rank calls.
_HEADER = struct.Struct(">Q24s")
FRAME_BYTES = 4096
ROOM_BYTES = FRAME_BYTES - _HEADER.size

# Every rank creates its exchanges in the same order, so that equal numbers mean the same one.
_created = itertools.count()


class _Frame(NamedTuple):
    """How one rank's object begins; `beginning` is padded."""

    length_bytes: int
    what: str
    beginning: bytes


class Exchange:
    """Ranks that exchange objects. Collective: every rank creates it, also those not among `ranks`.

    Args:
        name: whose exchange it is, for error messages.
        ranks: those who take part; the first is the one that gathers and broadcasts.
        rank: this process's.
        deadline_seconds: how long an exchange waits for the others.

    Raises:
        DeadlineExceeded: a rank did not come to create it; as of every exchange.
        SlotsError: a rank is lost, or has come to another exchange; likewise.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, deadline_seconds: float) -> None:
        self._name = name
        self._ranks = list(ranks)
        self._rank = rank
        self._deadline_seconds = deadline_seconds
        self._come_to = 0
        self._store = _get_default_store()
        self._key = f"trialflow/{next(_created)}"
        with self._meeting("connect"):
            self._group = dist.new_group(
                self._ranks, backend="gloo", timeout=timedelta(seconds=deadline_seconds)
            )

    def allgather(self, what: str, stuff: Any) -> list[Any]:
        """Everybody's `stuff`, in the order of `ranks`; `what` is what the caller calls this."""
        own = pickle.dumps(stuff)
        with self._meeting(what):
            frames = self._frames(what, own)
            rests = self._rests_of_all(own, _longest_rest(frames))
        return [_object(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def gather(self, what: str, stuff: Any) -> list[Any] | None:
        """Everybody's `stuff` on the first rank, None elsewhere."""
        own = pickle.dumps(stuff)
        with self._meeting(what):
            frames = self._frames(what, own)
            rests = self._rests_on_first(own, _longest_rest(frames))
        if not self._is_first:
            return None
        return [_object(frame, rest) for frame, rest in zip(frames, rests, strict=True)]

    def broadcast(self, what: str, stuff: Any) -> Any:
        """The first rank's `stuff`."""
        own = pickle.dumps(stuff) if self._is_first else b""
        with self._meeting(what):
            frames = self._frames(what, own)
            rest = self._rest_of_first(own, _longest_rest(frames))
        return stuff if self._is_first else _object(frames[0], rest)

    # ------------------------------------------------------------------ what crosses the group

    @property
    def _is_first(self) -> bool:
        return self._rank == self._ranks[0]

    def _frames(self, what: str, own: bytes) -> list[_Frame]:
        """Everybody's frame. torch's collectives of objects take two rounds before any object.

        Raises:
            SlotsError: a rank calls something else. All ranks raise, instead of misreading each
                other.
        """
        frame = _HEADER.pack(len(own), what.encode()) + own[:ROOM_BYTES]
        frames = []
        for received in self._all_gather(frame, FRAME_BYTES):
            length_bytes, doing = _HEADER.unpack_from(received)
            doing = doing.rstrip(b"\0").decode()
            frames.append(_Frame(length_bytes, doing, received[_HEADER.size :]))
        elsewhere = [
            f"rank {rank} called {frame.what} instead"
            for rank, frame in zip(self._ranks, frames, strict=True)
            if frame.what != what
        ]
        if elsewhere:
            raise SlotsError(
                f"{self._where(what)}: {'; '.join(elsewhere)}. Every rank must call the same, in "
                "the same order"
            )
        return frames

    def _rests_of_all(self, own: bytes, size_bytes: int) -> list[bytes]:
        return self._all_gather(own[ROOM_BYTES:], size_bytes)

    def _rests_on_first(self, own: bytes, size_bytes: int) -> list[bytes]:
        sent = _tensor(own[ROOM_BYTES:], size_bytes)
        received = [torch.empty_like(sent) for _ in self._ranks] if self._is_first else None
        if size_bytes:
            dist.gather(sent, received, dst=self._ranks[0], group=self._group)
        return [_bytes(tensor) for tensor in received or ()]

    def _rest_of_first(self, own: bytes, size_bytes: int) -> bytes:
        rest = _tensor(own[ROOM_BYTES:], size_bytes)
        if size_bytes:
            dist.broadcast(rest, src=self._ranks[0], group=self._group)
        return _bytes(rest)

    def _all_gather(self, own: bytes, size_bytes: int) -> list[bytes]:
        """Everybody's bytes, padded to `size_bytes`, the same on all ranks; nothing for 0."""
        sent = _tensor(own, size_bytes)
        received = [torch.empty_like(sent) for _ in self._ranks]
        if size_bytes:
            dist.all_gather(received, sent, group=self._group)
        return [_bytes(tensor) for tensor in received]

    # ----------------------------------------------------------------------- what went wrong

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._come_to += 1
        try:
            self._store.set(f"{self._key}/{self._rank}", str(self._come_to))
            yield
        except RuntimeError as error:  # what gloo and the store raise, for whatever reason
            seconds = time.monotonic() - began
            raise self._explained(what, seconds, error) from error

    def _explained(self, what: str, seconds: float, error: RuntimeError) -> SlotsError:
        try:
            others = self._who_is_absent()
        except RuntimeError:
            others = "rank 0, which keeps the ranks' meeting point, is gone"
        where = self._where(what)
        # A deadline shows as a little less than itself: gloo measures it by its own clock.
        if seconds < 0.9 * self._deadline_seconds:
            return SlotsError(f"{where} failed after {seconds:.1f} s: {others}; {error}")
        return DeadlineExceeded(
            f"{where} waited {self._deadline_seconds:g} s: {others}. Every rank must call it, in "
            "the same order; if it may take longer, set TRIALFLOW_COLLECTIVE_SECONDS"
        )

    def _where(self, what: str) -> str:
        return f"context.distributed.{what} ({self._name}) on rank {self._rank}"

    def _who_is_absent(self) -> str:
        absent = [str(rank) for rank in self._ranks if self._seen_of(rank) < self._come_to]
        return f"rank {', '.join(absent)} did not come" if absent else "all ranks had come"

    def _seen_of(self, rank: int) -> int:
        """How many exchanges a rank has come to."""
        key = f"{self._key}/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _longest_rest(frames: Sequence[_Frame]) -> int:
    return max(0, max(frame.length_bytes for frame in frames) - ROOM_BYTES)


def _object(frame: _Frame, rest: bytes) -> Any:
    return pickle.loads((frame.beginning + rest)[: frame.length_bytes])


def _tensor(data: bytes, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)  # which frombuffer refuses to make
    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
