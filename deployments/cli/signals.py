"""Ctrl-C, SIGTERM and SIGHUP: the first lets a command clean up, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# One Ctrl-C may arrive twice: from the terminal, and from a parent process that forwards it.
SAME_REQUEST_SECONDS = 1.0

SHOW_CURSOR = b"\x1b[?25h\n"


class Terminated(BaseException):
    """SIGTERM or SIGHUP was received. Like KeyboardInterrupt, not an `Exception`."""


@contextmanager
def stoppable(on_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, the first SIGINT raises KeyboardInterrupt; SIGTERM and SIGHUP `Terminated`.

    A SIGHUP that is ignored (nohup) stays so. A second signal ends the process at once; the ranks
    and the embedded server then end by themselves. While a flow runs, Prefect handles SIGTERM and
    passes it on afterwards.

    Args:
        on_stop: called in the signal handler with the signal's name.
    """
    received: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() - received[0] < SAME_REQUEST_SECONDS:
            return
        if received:
            with suppress(OSError):  # a terminal that was closed
                if os.isatty(1):
                    os.write(1, SHOW_CURSOR)
            os._exit(128 + number)
        received.append(time.monotonic())
        on_stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
