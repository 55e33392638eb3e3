"""Calls one function of a code folder in a separate process, which runs this module.

Standard input holds one line of JSON, the argument. The process reports over a pipe that the
function returned. Exit code 0 does not prove that, as `sys.exit()` gives it too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from pathlib import Path
from signal import SIGKILL
from typing import Any

from trial_core.common import text_format
from trial_core.processes.machine.child import Child, end_with_parent

POLL_SECONDS = 0.1
KILL_SECONDS = 30.0
LOG_TAIL_BYTES = 2000
LOG_LINES = 200

_RETURNED = b"returned"


def call_function(
    function: str,
    argument: Mapping[str, Any] | None,
    *,
    code: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    should_cancel: Callable[[], bool] = lambda: False,
    result: Path | None = None,
) -> str | None:
    """Call a function in a new process.

    Args:
        function: ``module:function``. A coroutine function is awaited; for a Prefect task, its
            function is called.
        argument: its only argument, plain data. None imports the function without calling it.
        code: first folder on the import path, and working folder.
        environment: variables in addition to those of this process.
        result: the file for the function's return value, as JSON.

    Returns:
        The failure, for people; None if the function returned.
    """
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    try:
        with log.open("wb") as output:
            child = Child(
                [
                    "-m", "trial_core.processes.machine.function_process",
                    function, str(write_end), *([] if result is None else [str(result)]),
                ],
                _environment(environment or {}), folder=code, log=output, descriptors=[write_end],
            )  # fmt: skip
        try:
            child.tell(json.dumps(argument).encode() + b"\n")
            while not child.wait(POLL_SECONDS):
                if should_cancel():
                    return "killed: the run was stopped"
                if timeout_seconds is not None and time.monotonic() - start >= timeout_seconds:
                    return f"killed: it took longer than {timeout_seconds:g} s"
        finally:
            child.kill(KILL_SECONDS)
        if child.exit_code == 0 and _has_returned(read_end):
            return None
    finally:
        os.close(read_end)
        os.close(write_end)
    return _describe_failure(child.exit_code, log)


def log_lines(log: Path) -> list[str]:
    """A called function's output; of a long text only the end, so that a server can take it."""
    lines = log.read_text(errors="replace").splitlines()
    left_out = len(lines) - LOG_LINES
    return lines if left_out <= 0 else [f"({left_out} lines: {log})", *lines[left_out:]]


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The given variables; this package is importable in any folder."""
    others = given.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = [str(Path(__file__).parents[3]), *filter(None, [others])]
    return {**given, "PYTHONPATH": os.pathsep.join(path)}


def _has_returned(pipe: int) -> bool:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, len(_RETURNED)) == _RETURNED
    except BlockingIOError:
        return False


def _describe_failure(exit_code: int | None, log: Path) -> str:
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    lines = [line for line in text_format.clean(tail).splitlines() if line.strip()]
    message = lines[-1].strip() if lines else "no output"
    if exit_code == 0:
        message = "the process ended (sys.exit, os._exit) before the function returned"
    code = -SIGKILL if exit_code is None else exit_code  # None: it hangs, although it was killed
    ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return f"{message} ({ending}; output: {log})"


def main(name: str, result_pipe: int, result_file: str | None = None) -> None:
    os.set_inheritable(result_pipe, False)
    argument = json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    function = _import_function(name)
    if argument is not None:
        result = function(argument)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        if result_file is not None:
            Path(result_file).write_text(json.dumps(result, default=_plain))
    os.write(result_pipe, _RETURNED)


def _import_function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found = attrgetter(function)(importlib.import_module(module))
    if hasattr(found, "task_key"):  # a task of Prefect
        found = found.fn
    if not callable(found):
        raise TypeError(f"{name} is not callable: {found!r}")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise TypeError(f"{name} is a generator function: calling it would run nothing")
    return found  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:  # a scalar of NumPy or PyTorch
    if not hasattr(value, "item"):
        raise TypeError(f"expected plain data as the result, got {value!r}")
    return value.item()


async def _await(result: Awaitable[Any]) -> Any:
    return await result


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # Python may be configured not to add it
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
