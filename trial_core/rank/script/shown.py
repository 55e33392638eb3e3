"""What a script shows: its run's log, and once for all ranks an error of ours that ends it.

Most errors are raised on every rank: a misspelt field, a missing argument, a storage that cannot be
written. Rank 0 shows its error. Another rank shows its own only if rank 0 does not show the same
within seconds. They compare in torch.distributed's store, without a collective: the other ranks may
be anywhere.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trial_core.common.text_format import plural
from trial_core.errors import SlotsError, TrialflowError
from trial_core.rank.collectives.distributed import DistributedContext

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

WAIT_SECONDS = 5.0
POLL_SECONDS = 0.05
KEY = "trialflow/uncaught"
LIBRARY = str(Path(__file__).resolve().parents[2])

_installed: list[Hook] = []


def install() -> None:
    """Show uncaught `TrialflowError`s by `show` until the process ends. A second call does nothing.

    Call it before torch.distributed is initialised, which wraps the hook to name the rank.
    """
    if _installed:
        return
    other = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, TrialflowError):
            show(f"{error}{_place(error, frames)}")
        else:
            other(kind, error, frames)

    _installed.append(hook)
    sys.excepthook = hook


def show(text: str) -> None:
    """Print an error on stderr, unless rank 0 prints the same."""
    rank, size = _rank_and_size()
    store = _get_default_store() if dist.is_initialized() else None
    try:
        if rank == 0:
            print(f"error: {text}", file=sys.stderr, flush=True)
            if store is not None and size > 1:
                store.set(KEY, text)
                # Rank 0 may be the store's host, so the others read it before this rank ends.
                others = [f"{KEY}/{other}" for other in range(1, size)]
                _wait(lambda: store.check(others))
            return
        if store is not None and _wait(lambda: store.check([KEY])):
            is_shown = store.get(KEY).decode() == text
            store.set(f"{KEY}/{rank}", "1")
            if is_shown:
                return
    except RuntimeError:  # the store's host has ended
        if rank == 0:
            return
    print(f"error on rank {rank}: {text}", file=sys.stderr, flush=True)


def _rank_and_size() -> tuple[int, int]:
    ranks = DistributedContext.from_environment()
    return ranks.get_rank(), ranks.get_size()


def _place(error: TrialflowError, frames: TracebackType | None) -> str:
    """Where the script called us; for the end of a run, which may arrive anywhere, its `fit`."""
    calls = [
        (call, call.filename.startswith(LIBRARY))
        for call in traceback.extract_tb(frames)
        if "contextlib" not in call.filename
    ]
    if isinstance(error, SlotsError):
        calls = calls[: next((i for i, (_, is_ours) in enumerate(calls) if is_ours), None)]
    own = [call for call, is_ours in calls if not is_ours]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _wait(is_ready: Callable[[], bool]) -> bool:
    """Wait until `is_ready`, at most `WAIT_SECONDS`; return whether it is."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextmanager
def visible_logs() -> Iterator[None]:
    """Log to stderr during the block, unless the script has configured logging."""
    logger = logging.getLogger("trial_core")
    if logger.hasHandlers():
        _say_begin()
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _say_begin()
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _say_begin() -> None:
    rank, size = _rank_and_size()
    if rank == 0:
        driver = logging.getLogger("trial_core.driver")
        driver.info("starting %s, and a driver next to rank 0", plural(size, "rank"))
