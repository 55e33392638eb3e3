"""Declares a stage: a function that has the ranks of a launch do something, for people to see.

A run says how its stages are executed: `plain`, or in a flow as Prefect tasks (`tasks/stages.py`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from trial_core.checkpoint.storage.storage_errors import retry_storage
from trial_core.driver.run import Launch
from trial_core.errors import CheckpointNotFound, CheckpointRefused, TrialflowError
from trial_core.observe.ledger.run_clock import Bucket
from trial_core.processes.machine.background import in_background

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

BucketOf = Bucket | None | Callable[[Mapping[str, Any]], Bucket | None]
"""The clock's bucket for a stage's time, or how it follows from the arguments; None: idle."""


class OwnStageFailed(TrialflowError):
    """A stage of the user's own has failed. The run may continue."""


_SURVIVED = (OwnStageFailed, CheckpointRefused, CheckpointNotFound)
"""Errors of a stage after which a launch may continue. After others, it ends with all its stages,
or the stage begins again."""


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


@dataclass(frozen=True)
class DeclaredStage(Generic[P, T]):
    """A stage. A call executes it as the run of the launch says.

    Attributes:
        work: its function.
        name: its name for people, in the log, the report and the timeline.
        detail: follows the name; has fields of the function's arguments.
        bucket: counts its time.
        is_transfer: True if it is repeated after a pause when the storage fails.
        is_parallel: True if it runs in parallel with training; its result is a `Pending`.
    """

    work: Callable[..., Any]
    name: str
    detail: str = ""
    bucket: BucketOf = None
    is_transfer: bool = False
    is_parallel: bool = False

    def __call__(self, launch: Launch, *args: P.args, **kwargs: P.kwargs) -> T:
        executed = (launch.run.execute or plain)(self)
        return cast("T", executed(launch, *args, **kwargs))

    @contextmanager
    def timed(self, launch: Launch, *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        """Tell the observer of the stage, and count the time of the block in its bucket."""
        given = inspect.signature(self.work).bind(launch, *args, **kwargs).arguments
        detail = self.detail.format(**given)
        bucket = self.bucket(given) if callable(self.bucket) else self.bucket
        try:
            with launch.stage(self.name, detail, bucket):
                yield
        except _SURVIVED:
            launch.run.observer.stage_failed(self.name, detail)
            raise


def stage(
    name: str,
    detail: str = "",
    *,
    bucket: BucketOf,
    is_transfer: bool = False,
    is_timed: bool = True,
) -> Callable[[Callable[Concatenate[Launch, P], T]], DeclaredStage[P, T]]:
    """Declare a function as a stage, see `DeclaredStage`.

    `is_timed` is False if the function itself times a part of its work.
    """

    def declare(work: Callable[Concatenate[Launch, P], T]) -> DeclaredStage[P, T]:
        return _declared(work, is_timed, name, detail, bucket, is_transfer, False)

    return declare


def parallel_stage(
    name: str, detail: str, *, is_transfer: bool = False, is_timed: bool = True
) -> Callable[[Callable[Concatenate[Launch, P], T]], DeclaredStage[P, Pending[T]]]:
    """Declare a function as a stage that runs in parallel with training, as `stage` does.

    The slots do not wait for it, so its time has no bucket.
    """

    def declare(work: Callable[Concatenate[Launch, P], T]) -> DeclaredStage[P, Pending[T]]:
        return _declared(work, is_timed, name, detail, None, is_transfer, True)

    return declare


def _declared(work: Callable[..., Any], is_timed: bool, *facts: Any) -> DeclaredStage[Any, Any]:
    @wraps(work)
    def timed_work(*args: Any, **kwargs: Any) -> Any:
        with declared.timed(*args, **kwargs):
            return work(*args, **kwargs)

    declared = DeclaredStage[Any, Any](timed_work if is_timed else work, *facts)
    return declared


def plain(declared: DeclaredStage[..., Any]) -> Callable[..., Any]:
    """How a stage is executed without Prefect: repeated if the storage fails, or in a thread."""

    def execute(*args: Any, **kwargs: Any) -> Any:
        work = partial(declared.work, *args, **kwargs)
        if declared.is_transfer:
            work = partial(retry_storage, work)
        return in_background(work, declared.name) if declared.is_parallel else work()

    return execute
