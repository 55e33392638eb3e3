"""Ctrl-C and SIGTERM: the first signal lets a command clean up, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# One Ctrl-C may arrive twice: from the terminal, and from a parent process that forwards it.
SAME_REQUEST_SECONDS = 1.0

SHOW_CURSOR = b"\x1b[?25h\n"


class Terminated(BaseException):
    """SIGTERM was received. Like KeyboardInterrupt, not an `Exception`."""


@contextmanager
def stoppable(on_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, the first SIGINT raises KeyboardInterrupt, the first SIGTERM `Terminated`.

    A second signal ends the process at once; the ranks and the embedded server then end by
    themselves. While a flow runs, Prefect handles SIGTERM and passes it on afterwards.

    Args:
        on_stop: called in the signal handler with the signal's name.
    """
    received: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() - received[0] < SAME_REQUEST_SECONDS:
            return
        if received:
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
            os._exit(128 + number)
        received.append(time.monotonic())
        on_stop("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
