"""Ctrl-C and SIGTERM end a command in good order, once; asked again, it ends at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# One Ctrl-C may arrive twice: from the terminal, and from a parent that hands it on.
SAME_REQUEST_SECONDS = 1.0

SHOW_CURSOR = b"\x1b[?25h\n"


class Terminated(BaseException):
    """SIGTERM was received. No Exception, as KeyboardInterrupt is none."""


@contextmanager
def stoppable(on_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block SIGINT raises KeyboardInterrupt, and SIGTERM `Terminated`, once.

    Another signal later on ends the process without waiting: ranks and the embedded server go by
    themselves when it is gone. While a flow runs, Prefect has SIGTERM; it hands it on afterwards.

    Args:
        on_stop: told which signal, in the signal handler.
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
