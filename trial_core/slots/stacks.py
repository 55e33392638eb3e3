"""Has hung ranks write the stacks of all their threads to their logs.

By a signal: a hung rank may be in native code that holds the interpreter's lock, and then cannot
receive a message.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import time
from collections.abc import Sequence
from typing import Protocol

DUMP_SECONDS = 2.0
_SIGNAL = signal.SIGUSR2
_STACK = re.compile(r"^(?:Current thread|Thread) 0x[^\n]*\n(?:  [^\n]*\n)+", re.MULTILINE)
# The outermost frame of ``python -m …``. It is written last, so a stack with it is complete.
_OUTERMOST = "in _run_module_as_main\n"


class RankWithStacks(Protocol):
    """A rank's process, as the driver sees it."""

    def signal(self, number: int) -> None: ...

    def log_size(self) -> int: ...

    def log_from(self, start: int) -> str: ...


def register_stack_dump() -> None:
    """Have this process write its threads' stacks to stderr at the signal of `log_stacks`."""
    faulthandler.enable()
    faulthandler.register(_SIGNAL, all_threads=True)


def log_stacks(ranks: Sequence[RankWithStacks]) -> list[str]:
    """Have every rank log the stacks of its threads; returns the main threads' stacks, by rank.

    Waits at most two seconds.
    """
    sizes = [rank.log_size() for rank in ranks]
    for rank in ranks:
        rank.signal(_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    while True:
        dumps = [rank.log_from(start) for rank, start in zip(ranks, sizes, strict=True)]
        stacks = [_main_thread(dump) for dump in dumps]
        if all(stacks) or time.monotonic() > deadline:
            return [stack or "(no stack in the log)" for stack in stacks]
        time.sleep(0.05)


def _main_thread(dump: str) -> str | None:
    """The stack of the main thread, which comes last; None: not completely written yet."""
    stacks = _STACK.findall(dump)
    return stacks[-1].rstrip() if stacks and stacks[-1].endswith(_OUTERMOST) else None
