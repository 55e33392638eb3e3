"""Objects exchanged between some ranks, with a deadline, and a name for whoever did not come.

The objects travel over a gloo group. Beside it each rank notes in torch.distributed's store how
many exchanges it has come to: one small message, which is read only when an exchange has failed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.errors import DeadlineExceeded, SlotsError

# Every rank creates its exchanges in the same order, so that equal numbers mean the same one.
_created = itertools.count()


class Exchange:
    """Ranks that exchange objects. Collective: every rank creates it, also those not among `ranks`.

    Args:
        name: whose exchange it is, for error messages.
        ranks: those who take part; the first is the one that gathers and broadcasts.
        rank: this process's.
        deadline_seconds: how long an exchange waits for the others.

    Raises:
        DeadlineExceeded: a rank did not come to create it; as of every exchange.
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
        everybody: list[Any] = [None] * len(self._ranks)
        with self._meeting(what):
            dist.all_gather_object(everybody, stuff, group=self._group)
        return everybody

    def gather(self, what: str, stuff: Any) -> list[Any] | None:
        """Everybody's `stuff` on the first rank, None elsewhere."""
        is_first = self._rank == self._ranks[0]
        everybody: list[Any] | None = [None] * len(self._ranks) if is_first else None
        with self._meeting(what):
            dist.gather_object(stuff, everybody, dst=self._ranks[0], group=self._group)
        return everybody

    def broadcast(self, what: str, stuff: Any) -> Any:
        """The first rank's `stuff`."""
        box = [stuff]
        with self._meeting(what):
            dist.broadcast_object_list(box, src=self._ranks[0], group=self._group)
        return box[0]

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._come_to += 1
        try:
            self._store.set(f"{self._key}/{self._rank}", f"{self._come_to} {what}")
            yield
        except RuntimeError as error:  # what gloo and the store raise, for whatever reason
            seconds = time.monotonic() - began
            raise self._explained(what, seconds, error) from error

    def _explained(self, what: str, seconds: float, error: RuntimeError) -> SlotsError:
        try:
            others = self._what_others_do(what)
        except RuntimeError:
            others = "rank 0, which keeps the ranks' meeting point, is gone"
        where = f"context.distributed.{what} ({self._name}) on rank {self._rank}"
        # A deadline shows as a little less than itself: gloo measures it by its own clock.
        if seconds < 0.9 * self._deadline_seconds:
            return SlotsError(f"{where} failed after {seconds:.1f} s: {others}; {error}")
        return DeadlineExceeded(
            f"{where} waited {self._deadline_seconds:g} s: {others}. Every rank must call it, in "
            "the same order; if it may take longer, set TRIALFLOW_COLLECTIVE_SECONDS"
        )

    def _what_others_do(self, what: str) -> str:
        """Who has not come, and who has come to something else."""
        absent, elsewhere = [], []
        for rank in self._ranks:
            number, doing = self._seen_of(rank)
            if number < self._come_to:
                absent.append(str(rank))
            elif number == self._come_to and doing != what:
                elsewhere.append(f"rank {rank} called {doing} instead")
        parts = [f"rank {', '.join(absent)} did not come"] if absent else []
        return "; ".join(parts + elsewhere) or "all ranks had come"

    def _seen_of(self, rank: int) -> tuple[int, str]:
        key = f"{self._key}/{rank}"
        if not self._store.check([key]):
            return 0, ""
        number, _, doing = self._store.get(key).decode().partition(" ")
        return int(number), doing
