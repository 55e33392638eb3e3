"""Has hung ranks write the stacks of all their threads to their logs.

A signal is used: a hung rank may be in native code that holds the interpreter's lock, and then
cannot receive a message. A rank of another machine that the driver has not started gets a message.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trial_core.processes.slots.rank_handle import RankHandle

DUMP_SECONDS = 2.0
SETTLED_SECONDS = 0.3
STACK_SIGNAL = signal.SIGRTMAX - 3
"""SIGUSR1 and SIGUSR2 are left to the user's programs and to Slurm."""
_STACK = re.compile(r"^(?:Current thread|Thread) 0x[^\n]*\n(?:  [^\n]*\n)+", re.MULTILINE)
# The outermost frame of ``python -m …``. It is written last, so a stack with it is complete. In
# other programs, a stack is complete when it has not grown for a moment.
_OUTERMOST = "in _run_module_as_main\n"


def register_stack_dump(descriptor: int = 2) -> None:
    """Have this process write its threads' stacks at the signal of `log_stacks`.

    The descriptor, by default stderr, must stay open until the next call.
    """
    if not faulthandler.is_enabled():  # a crash is written to stderr, or where the program wants
        faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def stack_log(log_dir: Path, rank: int) -> Path:
    """The file for the stacks of a rank that the driver has not started."""
    return log_dir / f"rank-{rank}.stacks"


def current_stacks() -> str:
    """The stacks of this process's threads, in the form that the signal writes."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:  # a full disk
        return f"the stacks cannot be read: {error}\n"


def log_stacks(ranks: Sequence[RankHandle]) -> list[str]:
    """Have every rank log the stacks of its threads; return the main threads' stacks, by rank."""
    sizes = [rank.log_size() for rank in ranks]
    for rank in ranks:
        rank.signal(STACK_SIGNAL)
    began = grown_at = time.monotonic()
    before: list[str] = []
    while True:
        dumps = [rank.log_from(start) for rank, start in zip(ranks, sizes, strict=True)]
        now = time.monotonic()
        grown_at, before = (grown_at, before) if dumps == before else (now, dumps)
        has_settled = all(dumps) and now - grown_at > SETTLED_SECONDS
        is_late = now - began > DUMP_SECONDS
        stacks = [_main_thread(dump, has_settled or is_late) for dump in dumps]
        if all(stacks) or is_late:
            return [stack or "(no stack in the log)" for stack in stacks]
        time.sleep(0.05)


def _main_thread(dump: str, is_complete: bool) -> str | None:
    """The stack of the main thread, which comes last; None if it is not complete yet."""
    stacks = _STACK.findall(dump)
    if stacks and (is_complete or stacks[-1].endswith(_OUTERMOST)):
        return str(stacks[-1]).rstrip()
    return None
