"""Tells flows in other threads than the main one that a signal has come.

Python hands signals to the main thread alone, where Prefect ends the flow that runs there. A flow
of the user's that trains in several threads then waits for them, and they would train on. A C
handler (`faulthandler`) may be installed from any thread: it writes into a pipe, and then calls the
handler that was there before. A flow that installs Python's handler in the main thread meanwhile
takes its place; the others then learn of the stop from their parents' states.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Not SIGHUP: the handler before it ends the process at once."""

Subscriber = Callable[[signal.Signals], None]
_lock = threading.Lock()
_subscribers: list[Subscriber] = []
_pipes: list[BinaryIO] = []


@contextmanager
def signals_in_thread(subscriber: Subscriber) -> Iterator[None]:
    """Call the subscriber, in a thread, for each signal that the process gets within the block."""
    with _lock:
        _subscribers.append(subscriber)
        if len(_subscribers) == 1:
            handled = [number for number in SIGNALS if callable(signal.getsignal(number))]
            _pipes.extend(map(_listen, handled))
    try:
        yield
    finally:
        with _lock:
            _subscribers.remove(subscriber)
            if not _subscribers:
                for number in SIGNALS:
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
