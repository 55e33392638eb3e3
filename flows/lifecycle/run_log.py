"""Makes the flow run's log readable: lines of a task name it, and a stop is not an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect import runtime
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler

from trial_core.common.any_logger import AnyLogger
from trial_core.errors import Stopped
from trial_core.observe.events.observers import current_observer

_TASKS, _FLOWS = "prefect.task_runs", "prefect.flow_runs"
# The state of a task that a stop has ended, as Prefect writes it.
_ENDED_BY_STOP = f"Finished in state Failed('Task run encountered an exception {Stopped.__name__}: "


# The subject of each run whose log is changed, or "" without one, by the flow run's id. Not a
# context variable, because a run logs in several threads. Other flows' lines stay as they are.
_SUBJECTS: dict[str, str] = {}


def _subject(record: logging.LogRecord) -> str | None:
    """Return the subject of the line's run, or None if its log is not changed."""
    return _SUBJECTS.get(str(getattr(record, "flow_run_id", "")))


class _Named(logging.Formatter):
    """Puts the subject and the task's name before a line. Prefect's console names the task too."""

    def __init__(self, wrapped: logging.Formatter) -> None:
        super().__init__()
        self._wrapped = wrapped

    def format(self, record: logging.LogRecord) -> str:
        subject, text = _subject(record), self._wrapped.format(record)
        if subject is None:
            return text
        names = (subject, getattr(record, "task_run_name", None))
        return "".join(f"{name}: " for name in names if name) + text


def _calm(record: logging.LogRecord) -> bool:
    """Prefect logs a task that ends by an exception as an error, with its traceback."""
    if _subject(record) is None:
        return True
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Stopped):
        record.msg, record.args = "ended by the stop: %s", (str(error),)
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True
    return not record.getMessage().startswith(_ENDED_BY_STOP)


def logger_finder() -> Callable[[], AnyLogger]:
    """Finds the log of the calling thread's task, else of this flow run, for any thread."""
    of_flow_run = get_run_logger()

    def find() -> AnyLogger:
        try:
            return get_run_logger()
        except MissingContextError:  # not a thread of Prefect's
            return of_flow_run

    return find


@contextmanager
def readable_task_log() -> Iterator[None]:
    """Change how this flow run logs its tasks, for the block."""
    logging.getLogger(_TASKS).addFilter(_calm)  # once, however often it is added
    for logger in map(logging.getLogger, (_TASKS, _FLOWS)):
        for handler in logger.handlers:
            # The formatter stays wrapped, because runs may overlap.
            if isinstance(handler, APILogHandler) and not isinstance(handler.formatter, _Named):
                handler.setFormatter(_Named(handler.formatter or logging.Formatter()))
    flow_run = str(runtime.flow_run.id)
    _SUBJECTS[flow_run] = ""
    try:
        yield
    finally:
        _SUBJECTS.pop(flow_run, None)


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Name the model that the block is about on each line of the log and of the terminal.

    Call within `readable_task_log`.
    """
    flow_run = str(runtime.flow_run.id)
    current_observer().subject_changed(subject)
    _SUBJECTS[flow_run] = subject
    try:
        yield
    finally:
        _SUBJECTS[flow_run] = ""
        current_observer().subject_changed("")
