"""Initialises a loader's worker processes: a worker ignores SIGTERM unless its rank sends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


def init_worker(user_init: Callable[[int], None] | None, worker: int) -> None:
    """The ``worker_init_fn`` of every loader.

    Args:
        user_init: the user's ``worker_init_fn``.
        worker: the worker's number.
    """
    rank_process = multiprocessing.parent_process()
    if rank_process is not None and rank_process.pid is not None:
        _accept_sigterm_only_from(rank_process.pid)
    if user_init is not None:
        user_init(worker)


def _accept_sigterm_only_from(rank_pid: int) -> None:
    """Make SIGTERM end this process only if process `rank_pid` sent it.

    Launchers and service managers signal all processes of a stopped run. The rank then finishes its
    batch, and needs its workers for that. A process learns the sender only if it waits for the
    signal, and it can wait only for a blocked signal; programs that a worker starts inherit the
    block. Where waiting is not possible (macOS), every SIGTERM ends the worker.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
