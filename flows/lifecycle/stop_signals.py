"""Signals to a flow: the first asks the run to stop, the second kills its ranks.

The whole route of a stop: `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, BinaryIO

from prefect.exceptions import Abort

from trial_core.observe.events.observers import current_observer
from trial_core.schedule.stop_requests import StopHandler, StopReason

# One Ctrl-C may arrive twice: from the terminal, and from a parent that forwards it.
SAME_REQUEST_SECONDS = 1.0
_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP: its terminal was closed",
}
# Not SIGHUP: the handler before it ends the process at once.
_IN_THREADS = (signal.SIGINT, signal.SIGTERM)

_lock = threading.Lock()
_subscribers: list[Callable[[signal.Signals], None]] = []
_pipes: list[BinaryIO] = []


class Interrupted(Abort, KeyboardInterrupt):
    """Ctrl-C ended the run, and its final state is set.

    Prefect shows a KeyboardInterrupt as a crash, and leaves an Abort alone.
    """


class StopSignals:
    """Takes the signals while a run can save. A third signal is Prefect's.

    Args:
        has_queue: True if the run goes back into a queue after a signal.
        wake: called in the signal handler; must be reentrant.

    Attributes:
        received: the first signal, or None before any.
        is_in_main_thread: True if the run is in the main thread, the only one that may raise for
            Prefect.
    """

    def __init__(self, stopping: StopHandler, has_queue: bool, wake: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._stopping = stopping
        self._has_queue = has_queue
        self._wake = wake
        self._received_at = 0.0
        self._is_repeated = False
        self._previous_handlers: dict[int, Any] = {}
        self._in_thread = ExitStack()
        self.is_in_main_thread = threading.current_thread() is threading.main_thread()

    def install(self) -> None:
        """Handle the signals from now on. In other threads, the main one gets them as well."""
        if not self.is_in_main_thread:
            self._in_thread.enter_context(signals_in_thread(self._note))
            return
        for number in _NAMES:
            previous = signal.getsignal(number)
            if previous not in (None, signal.SIG_IGN):  # set by C code, or ignored
                self._previous_handlers[number] = previous
                signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Let the previous handlers have the signals again."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        self._in_thread.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        if self._is_repeated:
            # If the run still does not end, its ranks are not the cause: a third is Prefect's.
            self.restore()

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            name = _NAMES[self.received]
            # At once: a later check, which may take a while, tells if it was a Cancel.
            reason: StopReason = "preempted" if self._has_queue else "interrupted"
            self._stopping.ask(reason, name, is_clear=False)
            self._wake()
            current_observer().stopping(name)
        elif now - self._received_at >= SAME_REQUEST_SECONDS:
            self._is_repeated = True
            self._stopping.kill_now()


@contextmanager
def signals_in_thread(subscriber: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call the subscriber, in a thread, for each signal that the process gets within the block.

    For flows in other threads than the main one. Python hands signals to the main thread alone,
    where Prefect ends the flow that runs there; flows of several threads would train on, and it
    waits for them. A C handler (`faulthandler`) may be installed from any thread: it writes into a
    pipe, and then calls the handler that was there before. A flow that installs Python's handler in
    the main thread meanwhile takes its place; the others then learn of the stop from their parents'
    states.
    """
    with _lock:
        _subscribers.append(subscriber)
        if len(_subscribers) == 1:
            handled = [number for number in _IN_THREADS if callable(signal.getsignal(number))]
            _pipes.extend(map(_listen, handled))
    try:
        yield
    finally:
        with _lock:
            _subscribers.remove(subscriber)
            if not _subscribers:
                for number in _IN_THREADS:
                    # It restores Python's handler, which would ignore a signal without a function:
                    # so not if the main thread has ended its flow, and with it our handler.
                    if callable(signal.getsignal(number)):
                        faulthandler.unregister(number)
                while _pipes:
                    _pipes.pop().close()  # its thread ends


def _listen(number: signal.Signals) -> BinaryIO:
    read_end, write_end = os.pipe()
    pipe = os.fdopen(write_end, "wb", buffering=0)
    faulthandler.register(number, file=pipe, all_threads=False, chain=True)
    threading.Thread(
        target=_tell, args=(number, read_end), name=f"signals {number.name}", daemon=True
    ).start()
    return pipe


def _tell(number: signal.Signals, read_end: int) -> None:
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while pipe.read(2**16):  # a traceback, which nobody reads
            for subscriber in [*_subscribers]:
                subscriber(number)
