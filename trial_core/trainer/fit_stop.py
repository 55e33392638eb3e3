"""Ends a fit on SIGTERM to any rank, or on the trial's own stop request.

All ranks end training after the same batch, save, and return from `fit`. A thread on each rank
polls torch.distributed's store for a request on another rank. No collective: ranks may be anywhere.
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

POLL_SECONDS = 1.0
AGREE_SECONDS = 0.01


class FitStop:
    """Handles SIGTERM and stop requests during the block. Collective: every rank enters it.

    SIGTERM does not end the process during the block. Only the main thread may handle signals: in
    another thread, the block handles stop requests alone.

    Args:
        stop_barrier: of this rank's controller.

    Attributes:
        is_requested: whether a rank has requested the stop, and all have agreed on the last batch.
    """

    def __init__(self, distributed: DistributedContext, stop_barrier: StopBarrier) -> None:
        self._stop_barrier = stop_barrier
        self._size = distributed.get_size()
        self._rank = distributed.get_rank()
        self._store = HashStore() if self._size == 1 else _separate_store()
        self._pid = os.getpid()
        self._key = f"trialflow/terminated/{distributed.broadcast(uuid4().hex)}"
        self._is_requested_here = False
        self._has_ended = threading.Event()
        self._previous_handler: Any = None
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)
        self.is_requested = False

    def __enter__(self) -> FitStop:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def request(self) -> None:
        """Request the stop on this rank, as SIGTERM does. Returns at once."""
        self._is_requested_here = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process forked from this rank: end it as by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_requested_here = True  # nothing else: a signal may interrupt any code

    def _watch(self) -> None:
        try:
            self._watch_and_agree()
        except RuntimeError:  # the store raises it once rank 0 is gone
            # Release this rank: its next collective raises the actual error.
            self._stop_barrier.resume_until(Position(LAST_STEP, LAST_STEP))

    def _watch_and_agree(self) -> None:
        while not self._has_ended.wait(POLL_SECONDS):
            if self._is_requested_here or self._store.check([self._key]):
                break
        else:
            return
        self._store.set(self._key, "1")
        position = self._stop_barrier.pause()
        keys = [f"{self._key}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], f"{position.workload} {position.steps}")
        while not self._store.check(keys):
            if self._has_ended.wait(AGREE_SECONDS):
                return
        positions = (self._store.get(key).decode().split() for key in keys)
        self.is_requested = True
        self._stop_barrier.resume_until(
            max(Position(int(work), int(steps)) for work, steps in positions)
        )


def _separate_store() -> Store:
    """torch.distributed's store over a separate connection, if this torch can clone it.

    A thread that waits in the store blocks the other users of its connection.
    """
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store
