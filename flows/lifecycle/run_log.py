"""The flow run's log on the server: a task's lines name the task, and a stop is no error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import runtime
from prefect.logging.handlers import APILogHandler

from trial_core.errors import Stopped
from trial_core.run.observer import current_observer

_TASKS, _FLOWS = "prefect.task_runs", "prefect.flow_runs"
# The state of a task that a stop has ended, as Prefect writes it.
_ENDED_BY_STOP = f"Finished in state Failed('Task run encountered an exception {Stopped.__name__}: "


# What a flow run is about, by its id. No context variable: a run logs in several threads.
_SUBJECTS: dict[str, str] = {}


class _Named(logging.Formatter):
    """Puts the subject and the task's name before a line. Prefect's console names the task too."""

    def format(self, record: logging.LogRecord) -> str:
        subject = _SUBJECTS.get(getattr(record, "flow_run_id", ""))
        names = (subject, getattr(record, "task_run_name", None))
        return "".join(f"{name}: " for name in names if name) + super().format(record)


def _calm(record: logging.LogRecord) -> bool:
    """Prefect logs a task that ends by an exception as an error, with its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Stopped):
        record.msg, record.args = "ended by the stop: %s", (str(error),)
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True
    return not record.getMessage().startswith(_ENDED_BY_STOP)


@contextmanager
def readable_task_log() -> Iterator[None]:
    """Change how this process logs its tasks, for the block."""
    logger = logging.getLogger(_TASKS)
    logger.addFilter(_calm)
    try:
        with _formatted(_Named()):
            yield
    finally:
        logger.removeFilter(_calm)


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
        del _SUBJECTS[flow_run]
        current_observer().subject_changed("")


@contextmanager
def _formatted(formatter: logging.Formatter) -> Iterator[None]:
    """Format what this process sends to the server, for the block."""
    loggers = map(logging.getLogger, (_TASKS, _FLOWS))
    handlers = {
        each for logger in loggers for each in logger.handlers if isinstance(each, APILogHandler)
    }
    before = {handler: handler.formatter for handler in handlers}
    for handler in handlers:
        handler.setFormatter(formatter)
    try:
        yield
    finally:
        for handler, previous in before.items():
            handler.setFormatter(previous)
