"""Prefect's server and worker as child processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from trial_core.processes.machine.child import Child

STOP_TIMEOUT_SECONDS = 45.0
# On this terminal Prefect may be quiet. In a child, the levels of its loggers alone decide.
LOG_EVERYTHING = dict.fromkeys(
    ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL"), "DEBUG"
)


def start_child(
    command: list[str],
    variables: Mapping[str, str],
    log_path: Path | None,
    fds: tuple[int, ...] = (),
) -> Child:
    """Run a Python script that ends when its standard input does.

    Args:
        command: the script's path and its arguments.
        variables: environment variables to add to this process's own.
        log_path: the file that its output is appended to, or None for this process's output.
        fds: open file descriptors that the child inherits.
    """
    with ExitStack() as opened:
        log = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = opened.enter_context(log_path.open("ab"))
        return Child(command, {**variables, **LOG_EVERYTHING}, log=log, descriptors=fds)


def stop_child(child: Child) -> None:
    """Close the child's standard input and wait for its end; kill it after 45 s."""
    child.end(STOP_TIMEOUT_SECONDS)
