"""Work in a thread that does not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a new thread, which ends with the process at the latest."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the thread's top frame: `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
