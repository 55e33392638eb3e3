"""Where ranks that hang are: every thread's stack, written to their logs by Python itself.

By a signal, because a rank that hangs may hang in native code with the interpreter's lock held,
and then hears nothing that is said to it over the channel.
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
# The outermost frame of ``python -m …``; a stack is written line by line, and whole with this one.
_OUTERMOST = "in _run_module_as_main\n"


class RankWithStacks(Protocol):
    """A rank's process, as the driver holds it."""

    def signal(self, number: int) -> None: ...

    def log_size(self) -> int: ...

    def log_from(self, start: int) -> str: ...


def dump_stacks_when_asked() -> None:
    """Have this process write its threads' stacks to stderr when `log_stacks` asks it to."""
    faulthandler.enable()
    faulthandler.register(_SIGNAL, all_threads=True)


def log_stacks(ranks: Sequence[RankWithStacks]) -> list[str]:
    """Have every rank log the stacks of all its threads; the main threads' own, by rank.

    Waits until they have, two seconds at most.
    """
    sizes = [rank.log_size() for rank in ranks]
    for rank in ranks:
        rank.signal(_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    while True:
        dumps = [rank.log_from(start) for rank, start in zip(ranks, sizes, strict=True)]
        stacks = [_main_thread(dump) for dump in dumps]
        if all(stacks) or time.monotonic() > deadline:
            return [stack or "(it has logged no stack)" for stack in stacks]
        time.sleep(0.05)


def _main_thread(dump: str) -> str | None:
    """The stack of the main thread, which is the oldest and so the last; None: not there yet."""
    stacks = _STACK.findall(dump)
    return stacks[-1].rstrip() if stacks and stacks[-1].endswith(_OUTERMOST) else None
