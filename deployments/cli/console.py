"""Errors and warnings on stderr, and the exit codes of `trialflow`."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

from trial_core.checkpoint.storage.credentials import without_credentials
from trial_core.common import text_format
from trial_core.errors import (
    CheckpointDamaged,
    CommitConflict,
    ConfigError,
    LaunchError,
    PromotionConflict,
    RankFailed,
    SlotsError,
    TrialError,
    TrialflowError,
)
from trialflow.deployments.cli.waiting import print_above_the_wait

FAILED = 1
REFUSED = 2
BUG = 70
INTERRUPTED = 130
TERMINATED = 143
EXIT_CODES = {
    0: "success",
    FAILED: "failure: a rank died or raised, the storage failed, a checkpoint is damaged; `doctor` "
    "found a problem",
    REFUSED: "refused: wrong usage, experiment, trial or storage; change something and try again",
    BUG: "a bug in trialflow; the traceback is in a file, or on stderr with `TRIALFLOW_DEBUG=1`",
    INTERRUPTED: "stopped by Ctrl-C",
    TERMINATED: "stopped by SIGTERM",
}
"""They are part of the interface."""

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)


def error(text: str) -> None:
    _say("error", text, colour="31")


def warning(text: str) -> None:
    _say("warning", text, colour="33")


def note(text: str) -> None:
    """Print details of an error, or advice, to stderr."""
    print_above_the_wait(text_format.clean(text), sys.stderr)


def is_confirmed(question: str, done: str, advice: str = "") -> bool:
    """Ask on the terminal whether to do something irreversible; print if it is not done.

    Raises:
        ConfigError: stdin is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"nothing was {done}: give --yes to {question}{advice}")
    try:
        answer = input(f"{question}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    note(f"nothing was {done}")
    return False


def is_debugging() -> bool:
    """Return whether TRIALFLOW_DEBUG asks for tracebacks."""
    return os.environ.get("TRIALFLOW_DEBUG", "") not in ("", "0")


def report(failure: TrialflowError, code_folder: Path | None = None) -> None:
    """Print an error that trialflow raised deliberately.

    Args:
        code_folder: the folder of the user's trial; the innermost line in it is printed.
    """
    if isinstance(failure, RankFailed):
        _report_rank(failure, code_folder)
    elif isinstance(failure, ConfigError):
        for line in str(failure).splitlines():
            error(line)  # one mistake a line
    else:
        error(str(failure))
    if is_debugging():
        note("".join(traceback.format_exception(failure)))


def report_bug(failure: Exception) -> None:
    """Print an unexpected error, and write its traceback to a file."""
    details = "".join(traceback.format_exception(failure))
    message = text_format.one_line(str(failure))
    error(f"this is a bug in trialflow: {type(failure).__name__}: {message}")
    if is_debugging():
        note(details)
        return
    with tempfile.NamedTemporaryFile(
        "w", prefix="trialflow-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"{' '.join(map(_without_value, sys.argv))}\n\n{details}")
    note(f"details to report: {file.name} (TRIALFLOW_DEBUG=1 prints them here)")


def _without_value(word: str) -> str:
    """Return a command line's word without the value that it may set, possibly a credential."""
    name, equals, _ = without_credentials(word).partition("=")
    return f"{name}=..." if equals else name


def exit_code(failure: TrialflowError, has_trained: bool = False) -> int:
    """An error's exit code; after the first batch, storage and launch errors are failures."""
    if isinstance(failure, RankFailed):
        return REFUSED if failure.is_trial_mistake else FAILED
    if isinstance(failure, (ConfigError, TrialError)):
        return REFUSED
    if isinstance(failure, SlotsError) and not isinstance(failure, LaunchError):
        return FAILED
    is_broken = isinstance(failure, (CheckpointDamaged, CommitConflict, PromotionConflict))
    return FAILED if has_trained or is_broken else REFUSED


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warning(record.getMessage())


_OWN_LOGGERS = tuple(map(logging.getLogger, ("trial_core", "trialflow")))
_OWN_WARNINGS = _Printed(logging.WARNING)
"""The single instance: a logger adds the same handler only once."""


def show_warnings() -> None:
    """Print the warnings and errors that trialflow's own modules log."""
    for logger in _OWN_LOGGERS:
        logger.addHandler(_OWN_WARNINGS)


def show_log() -> None:
    """Print the log of all modules to stderr, with times, in place of warnings alone."""
    for logger in _OWN_LOGGERS:
        logger.removeHandler(_OWN_WARNINGS)
    form = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)


def _say(kind: str, text: str, colour: str) -> None:
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = f"\x1b[1;{colour}m{kind}:\x1b[0m" if coloured else f"{kind}:"
    print_above_the_wait(f"{label} {text_format.clean(text)}", sys.stderr)


def _report_rank(failure: RankFailed, code_folder: Path | None) -> None:
    if not failure.is_ours:
        headline, _, rest = failure.report().partition("\n")
        error(headline)
        note(rest)
        return
    # Our own error: its message is enough, without a traceback.
    error(failure.error_message or failure.headline)
    place = _place_in(code_folder, failure.rank_traceback or "")
    if place:
        note(f"raised at {place}")
    if failure.log_path:
        note(f"whole log of rank {failure.rank}: {failure.log_path}")


def _place_in(folder: Path | None, rank_traceback: str) -> str | None:
    """Return the innermost line of a traceback that is in `folder`, or None."""
    if folder is None:
        return None
    frames = [
        frame
        for frame in _FRAME.finditer(rank_traceback)
        if Path(frame["file"]).is_relative_to(folder)
    ]
    if not frames:
        return None
    return f"{frames[-1]['file']}, line {frames[-1]['line']}, in {frames[-1]['function']}"
