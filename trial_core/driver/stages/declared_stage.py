"""Declares a stage, and runs it without Prefect: repeated, or in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import ParamSpec

from trial_core.checkpoint.storage.retrying import retry_storage
from trial_core.processes.machine.background import in_background

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A stage that runs in parallel with training: a future of Python's or Prefect's."""

    def result(self) -> T_co:
        """Wait for the end. Raises the stage's error."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` at the end, in any thread."""


class Running(Generic[T]):
    """A stage that runs in parallel with training, with an event for its end.

    To read the state of a Prefect future would ask the server, over HTTP. The future is kept
    because Prefect complains about one that is dropped before it has ended.
    """

    def __init__(self, pending: Pending[T]) -> None:
        self.pending = pending
        self.ended = threading.Event()
        pending.add_done_callback(lambda _: self.ended.set())


def retried(stage: Callable[P, T]) -> Callable[P, T]:
    """Wrap a stage so that it is repeated after a pause if the storage fails."""

    @wraps(stage)
    def work(*args: P.args, **kwargs: P.kwargs) -> T:
        return retry_storage(lambda: stage(*args, **kwargs))

    return work


def beside(stage: Callable[P, T]) -> Callable[P, Pending[T]]:
    """Wrap a stage so that it runs in a thread, which does not keep the process alive."""

    @wraps(stage)
    def start(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return in_background(partial(stage, *args, **kwargs), stage.__name__)

    return start


@dataclass(frozen=True)
class DeclaredStage:
    """A stage as it is declared in `Stages`.

    Attributes:
        work: its function.
        name: its name for people, in the log, the report and the timeline.
        detail: follows the name; has fields of the function's arguments.
        is_transfer: True if it is repeated after a pause when the storage fails.
        is_parallel: True if it runs in parallel with training; its result is a `Pending`.
    """

    work: Callable[..., Any]
    name: str
    detail: str = ""
    is_transfer: bool = False
    is_parallel: bool = False


def declared(
    work: Callable[..., Any],
    name: str,
    detail: str = "",
    *,
    is_transfer: bool = False,
    is_parallel: bool = False,
) -> Any:
    """Return a field of `Stages`. Its default runs the stage without Prefect."""
    plain = retried(work) if is_transfer else work
    return field(
        default=beside(plain) if is_parallel else plain,
        metadata={"stage": DeclaredStage(work, name, detail, is_transfer, is_parallel)},
    )
