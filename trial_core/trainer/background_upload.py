"""A rank's part of an upload, beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from trial_core.controller.collective_errors import Outcome
from trial_core.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 3
PAUSE_SECONDS = 5.0


def persistently(work: Callable[[], T]) -> T:
    """Do `work`, which may be done again, and again after a pause where the storage fails.

    Raises:
        StorageError: it still does.
    """
    for attempt in range(1, TRIES):
        try:
            return work()
        except StorageError as error:
            logger.warning(
                "the storage failed, and is asked again in %g s (try %d of %d): %s",
                PAUSE_SECONDS, attempt, TRIES, error,
            )  # fmt: skip
            time.sleep(PAUSE_SECONDS)
    return work()


class BackgroundUpload:
    """An upload under way, in a thread of its own. No collective happens there.

    The thread does not keep the process alive: a rank that fails must end at once, so that its
    launcher ends the others.

    Args:
        work: what is done there; gives how it ended.
    """

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._future: Future[Outcome] = Future()
        threading.Thread(
            target=self._run, args=(work,), name="checkpoint-upload", daemon=True
        ).start()

    def outcome(self, within_seconds: float = 0.0) -> Outcome | None:
        """How it has ended; None while it is under way. Waits that long for its end.

        Raises:
            Exception: what ended `work` in place of an outcome.
        """
        has_ended = wait([self._future], timeout=within_seconds).done
        return self._future.result() if has_ended else None

    def _run(self, work: Callable[[], Outcome]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the thread's top frame: `outcome` raises it
            self._future.set_exception(error)
