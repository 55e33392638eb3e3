"""Work with a storage that may take long: uploads and copies, in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from trial_core.controller.collective_errors import Outcome, outcome_of
from trial_core.distributed import DistributedContext
from trial_core.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 3
PAUSE_SECONDS = 5.0
# How often ranks that wait for a background thread exchange its state: well within a collective's
# timeout.
POLL_SECONDS = 30.0


def retry_storage(work: Callable[[], T]) -> T:
    """Do `work`, which must be repeatable, and repeat it after a pause if the storage fails.

    Raises:
        StorageError: the last try failed.
    """
    for number in range(1, TRIES):
        try:
            return work()
        except StorageError as error:
            logger.warning(
                "the storage failed (try %d of %d), next try in %g s: %s",
                number, TRIES, PAUSE_SECONDS, error,
            )  # fmt: skip
            time.sleep(PAUSE_SECONDS)
    return work()


class BackgroundUpload:
    """An upload in a thread. No collective runs there.

    The thread does not keep the process alive: a failed rank must end at once, so that its
    launcher ends the others.

    Args:
        work: the upload; returns how it ended.
    """

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._future: Future[Outcome] = Future()
        threading.Thread(
            target=self._run, args=(work,), name="checkpoint-upload", daemon=True
        ).start()

    def outcome(self, within_seconds: float = 0.0) -> Outcome | None:
        """How the upload ended; None while it runs. Waits up to `within_seconds` for its end.

        Raises:
            Exception: the error that `work` raised.
        """
        has_ended = wait([self._future], timeout=within_seconds).done
        return self._future.result() if has_ended else None

    def _run(self, work: Callable[[], Outcome]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the thread's top frame: `outcome` raises it
            self._future.set_exception(error)


def run_long_on_rank_0(distributed: DistributedContext, work: Callable[[], T]) -> T:
    """As `run_on_rank_0`, for work that may take longer than a collective waits.

    Raises:
        TrialflowError: on every rank, if `work` failed.
    """
    own = BackgroundUpload(lambda: outcome_of(work)) if distributed.get_rank() == 0 else None
    outcome: Outcome | None = None
    while outcome is None:
        outcome = distributed.broadcast(own.outcome(POLL_SECONDS) if own is not None else None)
    outcome.raise_error()
    result: T = outcome.result
    return result
