"""What the command line says when something is wrong, and the exit code that goes with it.

Exit codes, which a script may rely on:

====  ==============================================================================================
0     done
1     it failed: a rank died or raised, the storage broke down, a checkpoint is damaged;
      `doctor` has found something that must be put right
2     it cannot be done as asked: wrong usage, experiment, trial or storage; change something first
70    a bug of trialflow
130   stopped by Ctrl-C
143   stopped by SIGTERM
====  ==============================================================================================
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

from trial_core import text_format
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

FAILED = 1
REFUSED = 2
BUG = 70
INTERRUPTED = 130
TERMINATED = 143

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)


def error(text: str) -> None:
    """Print an error to stderr."""
    _say("error", text, colour="31")


def warning(text: str) -> None:
    """Print a warning to stderr."""
    _say("warning", text, colour="33")


def note(text: str) -> None:
    """Print to stderr what belongs to an error or helps with it."""
    print(text_format.clean(text), file=sys.stderr, flush=True)


def is_debugging() -> bool:
    """Whether the user wants to see tracebacks."""
    return os.environ.get("TRIALFLOW_DEBUG", "") not in ("", "0")


def report(failure: TrialflowError, code_folder: Path | None = None) -> None:
    """Tell the user of an error that trialflow raised on purpose.

    Args:
        code_folder: where the user's trial is, if there is one: the place in it is shown.
    """
    if isinstance(failure, RankFailed):
        _report_rank(failure, code_folder)
    elif isinstance(failure, ConfigError):
        for line in str(failure).splitlines():
            error(line)  # every line is a mistake of its own
    else:
        error(str(failure))
    if is_debugging():
        note("".join(traceback.format_exception(failure)))


def report_bug(failure: Exception) -> None:
    """Tell the user of an error that nobody foresaw."""
    details = "".join(traceback.format_exception(failure))
    error(
        f"this is a bug of trialflow: {type(failure).__name__}: {text_format.one_line(str(failure))}"
    )
    if is_debugging():
        note(details)
        return
    with tempfile.NamedTemporaryFile(
        "w", prefix="trialflow-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"{' '.join(sys.argv)}\n\n{details}")
    note(f"details to report: {file.name} (TRIALFLOW_DEBUG=1 shows them here)")


def exit_code(failure: TrialflowError, has_trained: bool = False) -> int:
    """The exit code for an error; what fails after training has begun is no mistake of asking."""
    if isinstance(failure, RankFailed):
        return REFUSED if failure.is_trial_mistake else FAILED
    if isinstance(failure, (ConfigError, TrialError)):
        return REFUSED
    if isinstance(failure, SlotsError) and not isinstance(failure, LaunchError):
        return FAILED
    is_broken = isinstance(failure, (CheckpointDamaged, CommitConflict, PromotionConflict))
    return FAILED if has_trained or is_broken else REFUSED


class WarningsOfTrialflow(logging.Handler):
    """Prints what trialflow's own modules log as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Part of `logging.Handler`."""
        warning(record.getMessage())


OWN_WARNINGS = WarningsOfTrialflow()
"""The one there is: a logger takes the same handler once."""


def _say(kind: str, text: str, colour: str) -> None:
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = f"\x1b[1;{colour}m{kind}:\x1b[0m" if coloured else f"{kind}:"
    print(f"{label} {text_format.clean(text)}", file=sys.stderr, flush=True)


def _report_rank(failure: RankFailed, code_folder: Path | None) -> None:
    if not failure.is_ours:
        headline, _, rest = failure.report().partition("\n")
        error(headline)
        note(rest)
        return
    # An error of ours: its message says all, and no traceback is needed.
    error(failure.error_message or failure.headline)
    place = _place_in(code_folder, failure.rank_traceback or "")
    if place:
        note(f"raised at {place}")
    if failure.log_path:
        note(f"whole log of rank {failure.rank}: {failure.log_path}")


def _place_in(folder: Path | None, rank_traceback: str) -> str | None:
    """The innermost line of the user's code in a traceback."""
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
