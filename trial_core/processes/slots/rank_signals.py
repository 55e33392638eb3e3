"""Receives SIGTERM and SIGINT in a thread, also while the main thread is in C++ code.

Python runs the handler of a signal in the main thread, and only between two instructions of Python.
A rank that waits for its accelerator, or in a collective, is in C++ code, perhaps for ever. So a
thread learns of the signal from Python's wakeup file descriptor. `sigwait` would not do: threads
that exist already, such as NCCL's, would get the signal, and children would inherit the mask.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RankSignals:
    """Handles SIGTERM and SIGINT within the block, unless this process ignores them.

    Only the main thread may handle signals: in another thread, the block does nothing. In processes
    that are forked within the block, signals have the same effect as before the block. `handle` is
    also called for each signal, in the main thread between two instructions of Python.
    """

    _current: ClassVar[RankSignals | None] = None
    _forking: ClassVar[threading.local] = threading.local()

    def __init__(self, handle: Callable[[int], None]) -> None:
        self._handle = handle
        self._handlers_before: dict[int, Any] = {}
        self._socket_before = -1
        self._lock = threading.Lock()
        self._has_ended = False
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def __enter__(self) -> RankSignals:
        if threading.current_thread() is threading.main_thread():
            # In this order: a signal that is handled must be reported.
            self._socket_before = signal.set_wakeup_fd(
                self._waker.fileno(), warn_on_full_buffer=False
            )
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers_before[number] = signal.signal(
                        number, lambda number, frame: self._handle(number)
                    )
            RankSignals._current = self
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._has_ended = True
        if RankSignals._current is self:
            self._restore()
        with self._waker, suppress(OSError):  # full: `wait` returns anyway
            self._waker.send(b"\0")

    def wait(self, seconds: float) -> set[int] | None:
        """The signals that came, after at most `seconds`; None if the block has ended.

        Called in one thread.
        """
        self._woken.settimeout(seconds)
        try:
            numbers = set(self._woken.recv(4096))
        except TimeoutError:
            numbers = set()
        if self._has_ended:
            self._woken.close()
            return None
        return numbers & self._handlers_before.keys()

    def interrupt(self) -> None:
        """Have the main thread call `handle`, and wake it if it waits. For any thread."""
        with self._lock:
            number = next(iter(self._handlers_before), None)
            if number is not None and not self._has_ended:
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _restore(self) -> None:
        for number, handler in self._handlers_before.items():
            if handler is not None:  # None: C code had set it
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._socket_before)
        RankSignals._current = None

    @staticmethod
    def hold_back() -> None:
        """Before a fork: a signal to the new process waits until `restore_in_child`."""
        if RankSignals._current is not None:
            RankSignals._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    @staticmethod
    def let_through() -> None:
        """After a fork: hold nothing back."""
        mask = RankSignals._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @staticmethod
    def restore_in_child() -> None:
        """After a fork, in the child: restore its handlers, as it shares the parent's socket."""
        if RankSignals._current is not None:
            RankSignals._current._restore()
        RankSignals.let_through()


os.register_at_fork(
    before=RankSignals.hold_back,
    after_in_parent=RankSignals.let_through,
    after_in_child=RankSignals.restore_in_child,
)
