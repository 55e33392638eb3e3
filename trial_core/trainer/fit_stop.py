"""Ends a fit on SIGTERM to any rank, or on the trial's own stop request.

All ranks end training after the same batch, save, and return from `fit`. A thread on each rank
polls torch.distributed's store for a request on another rank. No collective: ranks may be anywhere.

Python runs the handler of a signal in the main thread, and only between two instructions of Python.
A rank that waits for its accelerator is in C++ code, perhaps for ever: with NCCL it waits for a
rank that has died until NCCL's timeout. So the thread learns of the signal by Python's wakeup file
descriptor; and if the ranks cannot agree on a last batch, it ends the rank.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.distributed import DistributedContext
from trial_core.slots.stop_barrier import LAST_STEP, Position, StopBarrier

POLL_SECONDS = 1.0
AGREE_SECONDS = 0.01

ANSWER_SECONDS = 15.0
"""How long the threads of other ranks may take to answer. torchrun kills ranks after 30 seconds."""

logger = logging.getLogger(__name__)


class FitStop:
    """Handles SIGTERM and stop requests during the block. Collective: every rank enters it.

    SIGTERM does not end the process during the block, unless another rank has died or hangs. Only
    the main thread may handle signals: in another thread, the block handles stop requests alone.

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
        self._key = f"trialflow/terminated/{distributed.broadcast(uuid4().hex)}"
        self._is_requested_here = False
        self._has_ended = threading.Event()
        self._signals: _Signals | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.settimeout(POLL_SECONDS)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)
        self.is_requested = False

    def __enter__(self) -> FitStop:
        if threading.current_thread() is threading.main_thread():
            self._signals = _Signals(self._waker)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._wake()
        self._thread.join()
        if self._signals is not None:
            self._signals.restore()
        self._woken.close()
        self._waker.close()

    def request(self) -> None:
        """Request the stop on this rank, as SIGTERM does. Returns at once."""
        self._is_requested_here = True
        self._wake()

    # -------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        try:
            problem = self._watch_and_agree()
        except RuntimeError:  # the store raises it once rank 0 is gone
            # Release this rank: its next collective raises the actual error, except with NCCL.
            self._stop_barrier.resume_until(Position(LAST_STEP, LAST_STEP))
            while not (self._is_requested_here or self._has_ended.is_set()):
                self._wait()
            problem = "rank 0, which hosts the ranks' store, is gone"
            self._has_ended.wait(ANSWER_SECONDS)
        if problem is not None and not self._has_ended.is_set():
            end_rank(problem)

    def _watch_and_agree(self) -> str | None:
        """Wait for a request, and agree on the last batch. Return what prevents that."""
        while not (self._is_requested_here or self._store.check([self._key])):
            self._wait()
            if self._has_ended.is_set():
                return None
        self._store.set(self._key, "1")
        position = self._stop_barrier.pause()
        keys = [f"{self._key}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], f"{position.workload} {position.steps}")
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._store.check(keys):
            if self._has_ended.wait(AGREE_SECONDS):
                return None
            if time.monotonic() >= deadline:
                silent = [str(r) for r, key in enumerate(keys) if not self._store.check([key])]
                return (
                    f"rank {', '.join(silent)} has not answered within {ANSWER_SECONDS:g} s: it "
                    "has died or hangs"
                )
        positions = (self._store.get(key).decode().split() for key in keys)
        self.is_requested = True
        self._stop_barrier.resume_until(
            max(Position(int(work), int(steps)) for work, steps in positions)
        )
        return None

    def _wait(self) -> None:
        """Wait until this thread is woken, or it is time to poll the store again."""
        with suppress(TimeoutError):
            if signal.SIGTERM in self._woken.recv(4096):
                self._is_requested_here = True

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is woken anyway; closed: it has ended
            self._waker.send(b"\0")


class _Signals:
    """Reports SIGTERM to a socket until `restore`; in processes that are forked, it ends them.

    Args:
        socket: gets the number of every signal that Python handles, as one byte, also while the
            main thread is in C++ code.
    """

    _current: _Signals | None = None

    def __init__(self, socket: socket.socket) -> None:
        # In this order: a signal that is handled must be reported.
        self._socket_before = signal.set_wakeup_fd(socket.fileno(), warn_on_full_buffer=False)
        self._handler_before: Any = signal.signal(signal.SIGTERM, _do_nothing)
        _Signals._current = self

    def restore(self) -> None:
        """Handle signals as before. Called in the main thread."""
        if self._handler_before is not None:  # None: C code had set it
            signal.signal(signal.SIGTERM, self._handler_before)
        signal.set_wakeup_fd(self._socket_before)
        _Signals._current = None

    @staticmethod
    def restore_in_child() -> None:
        """A forked process has the same socket: its signals must not be reported as this rank's."""
        if _Signals._current is not None:
            _Signals._current.restore()


os.register_at_fork(after_in_child=_Signals.restore_in_child)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler in Python. What C has written to the socket suffices."""


def end_rank(reason: str) -> None:
    """End this process at once, as SIGTERM does by default."""
    logger.error("this rank was asked to stop, and ends without a checkpoint: %s", reason)
    os._exit(128 + signal.SIGTERM)


def _separate_store() -> Store:
    """torch.distributed's store over a separate connection, if this torch can clone it.

    A thread that waits in the store blocks the other users of its connection.
    """
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store
