"""How a loader's worker process begins: it heeds its rank alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


def begin_worker(init: Callable[[int], None] | None, number: int) -> None:
    """Called in each worker as its ``worker_init_fn``, with its number.

    Args:
        init: the user's own ``worker_init_fn``.
    """
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid is not None:
        _heed_alone(rank.pid)
    if init is not None:
        init(number)


def _heed_alone(rank: int) -> None:
    """Have SIGTERM end this process only if process `rank` has sent it.

    Launchers and services that are stopped signal all of their processes. A rank then goes on to
    the end of its batch, for which it needs its workers. Only who waits for a signal is told who
    has sent it, and only what is blocked can be waited for: so programs that a worker starts begin
    with SIGTERM blocked. Where there is no waiting (macOS), a worker ends at every SIGTERM.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
