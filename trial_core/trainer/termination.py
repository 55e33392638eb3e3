"""SIGTERM to a script, or a trial's own wish to stop: whichever rank it comes to, all end their
training after the same batch, save, and return from `fit`.

A thread on each rank looks into torch.distributed's store now and then for whether another rank
was told to. No collective: ranks may be anywhere.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.distributed import DistributedContext
from trial_core.slots.stop_barrier import LAST_STEP, Position, StopBarrier

LOOK_SECONDS = 1.0
AGREE_SECONDS = 0.01


class Termination:
    """Watches for SIGTERM, and for `ask`, for the length of the block. Collective: every rank
    enters it.

    While it lasts, SIGTERM does not end the process; where the block is not in the main thread,
    which alone may handle signals, it still does.

    Args:
        stop_barrier: of this rank's controller.

    Attributes:
        is_asked: whether some rank was told to end, and this one's training has been held.
    """

    def __init__(self, distributed: DistributedContext, stop_barrier: StopBarrier) -> None:
        self._stop_barrier = stop_barrier
        self._size = distributed.get_size()
        self._rank = distributed.get_rank()
        self._store = HashStore() if self._size == 1 else _store_of_our_own()
        self._pid = os.getpid()
        self._key = f"trialflow/terminated/{distributed.broadcast(uuid4().hex)}"
        self._is_told = False
        self._is_over = threading.Event()
        self._before: Any = None
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)
        self.is_asked = False

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def ask(self) -> None:
        """This rank is to end, as at SIGTERM: its trial asks for it. Returns at once."""
        self._is_told = True

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked from this rank: it ends, as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_told = True  # no more: a signal may come in the middle of anything

    def _watch(self) -> None:
        try:
            self._watch_and_agree()
        except RuntimeError:  # what the store raises once rank 0 is gone: there is nobody to ask
            # Where this rank is held, its next collective tells what has happened.
            self._stop_barrier.resume_until(Position(LAST_STEP, LAST_STEP))

    def _watch_and_agree(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            if self._is_told or self._store.check([self._key]):
                break
        else:
            return
        self._store.set(self._key, "1")
        at = self._stop_barrier.pause()
        ranks = [f"{self._key}/{rank}" for rank in range(self._size)]
        self._store.set(ranks[self._rank], f"{at.workload} {at.steps}")
        while not self._store.check(ranks):
            if self._is_over.wait(AGREE_SECONDS):
                return
        held = (self._store.get(rank).decode().split() for rank in ranks)
        self.is_asked = True
        self._stop_barrier.resume_until(
            max(Position(int(workload), int(steps)) for workload, steps in held)
        )


def _store_of_our_own() -> Store:
    """torch.distributed's store over a connection of its own, where torch has that: whoever waits
    in the store keeps the others of its connection waiting."""
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store
