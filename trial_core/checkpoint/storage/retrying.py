"""Repeats work after a failure of the storage, where no Prefect task does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from trial_core.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 3
PAUSE_SECONDS = 5.0


def retry_storage(work: Callable[[], T]) -> T:
    """Do `work`, which must be repeatable, and repeat it after a pause if the storage fails."""
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
