"""The flow run's log on the server: a task's lines name the task, and a stop is no error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler

from trial_core.errors import Stopped

_TASKS = "prefect.task_runs"
# The state of a task that a stop has ended, as Prefect writes it.
_ENDED_BY_STOP = f"Finished in state Failed('Task run encountered an exception {Stopped.__name__}: "


class _NamedTask(logging.Formatter):
    """Puts the task's name before its line. Prefect's console does so by itself."""

    def format(self, record: logging.LogRecord) -> str:
        task = getattr(record, "task_run_name", None)
        line = super().format(record)
        return f"{task}: {line}" if task else line


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
    before = {
        handler: handler.formatter
        for handler in logger.handlers
        if isinstance(handler, APILogHandler)
    }
    for handler in before:
        handler.setFormatter(_NamedTask())
    logger.addFilter(_calm)
    try:
        yield
    finally:
        logger.removeFilter(_calm)
        for handler, formatter in before.items():
            handler.setFormatter(formatter)
