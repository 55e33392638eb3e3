"""Child processes that end when their standard input does, so also when their parent dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

STOP_TIMEOUT_SECONDS = 45.0
LOG_TAIL_BYTES = 4000
# On this terminal Prefect may be quiet. In a child, the levels of its loggers alone decide.
LOG_EVERYTHING = dict.fromkeys(
    ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL"), "DEBUG"
)


def start_child(
    command: list[str],
    variables: Mapping[str, str],
    log_path: Path | None,
    fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Run a Python script in a new session, so that the terminal's Ctrl-C does not reach it.

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
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=fds,
            start_new_session=True,
            env={**os.environ, **variables, **LOG_EVERYTHING},
        )


def stop_child(process: subprocess.Popen[bytes]) -> None:
    """Close the child's standard input and wait for its end; kill it after 45 s."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_tail(log_path: Path) -> str:
    """The end of a log, for an error message."""
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace").strip()
    return f"its log {log_path} ends with:\n{tail}" if tail else f"its log: {log_path}"
