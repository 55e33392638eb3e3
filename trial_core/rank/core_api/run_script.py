"""Runs a user's script in this process, as ``python train.py`` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trial_core.driver.entrypoint_check import entrypoint_problem
from trial_core.errors import TrialError
from trial_core.schedule.command import ScriptCommand


def run_script(command: ScriptCommand) -> None:
    """Run a script to its end, as ``__main__``. The current folder is the code folder.

    Raises:
        TrialError: the script or module does not exist.
        SystemExit: the script ended with an exit code other than 0; names it.
        Exception: the script raised.
    """
    folder = os.getcwd()
    path = os.path.join(folder, command.target)
    if (problem := entrypoint_problem(command.text, folder)) is not None:
        raise TrialError(problem)
    if not command.is_module:
        folder = os.path.dirname(path)
    with _as_program(command, folder):
        try:
            if command.is_module:
                runpy.run_module(command.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            _check_exit(end, command)


def _check_exit(end: SystemExit, command: ScriptCommand) -> None:
    """Raise `SystemExit` with a message unless the exit code is 0."""
    if end.code is None or end.code == 0:
        return
    code = f"code {end.code}" if isinstance(end.code, int) else f"code 1: {end.code}"
    failure = SystemExit(f"{command.target} exited with {code}")
    raise failure.with_traceback(end.__traceback__) from None


@contextmanager
def _as_program(command: ScriptCommand, folder: str) -> Iterator[None]:
    """Set the values in `sys` that a separate program would find."""
    argv, path = sys.argv, sys.path
    sys.argv = [command.target, *command.arguments]
    sys.path = [folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
