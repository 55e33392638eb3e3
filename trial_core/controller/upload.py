"""A rank's part of an upload, beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from trial_core.checkpoint.manifest import FileEntry
from trial_core.errors import StorageError

T = TypeVar("T")

TRIES = 3
PAUSE_SECONDS = 5.0


def persistently(work: Callable[[], T]) -> T:
    """Do `work`, which may be done again, and again after a pause where the storage fails.

    Raises:
        StorageError: it still does.
    """
    for _ in range(TRIES - 1):
        try:
            return work()
        except StorageError:
            time.sleep(PAUSE_SECONDS)
    return work()


class Upload:
    """Uploads what this rank has staged, in a thread of its own. No collective happens there.

    The thread does not keep the process alive: a rank that fails must end at once, so that its
    launcher ends the others.
    """

    def __init__(self, persist: Callable[[], list[FileEntry]]) -> None:
        self._future: Future[list[FileEntry]] = Future()
        threading.Thread(
            target=self._run, args=(persist,), name="checkpoint-upload", daemon=True
        ).start()

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Whether it has ended, well or not; waits that long for it."""
        return bool(wait([self._future], timeout=within_seconds).done)

    def files(self) -> list[FileEntry]:
        """What has been stored, once it has.

        Raises:
            CheckpointError: the upload failed.
        """
        return self._future.result()

    def _run(self, persist: Callable[[], list[FileEntry]]) -> None:
        try:
            self._future.set_result(persistently(persist))
        except BaseException as error:  # noqa: BLE001 - the thread's top frame: `files` raises it
            self._future.set_exception(error)
