"""The process that calls one function of a code folder: ``python -m trial_core.models.callback_process mod:fn``.

Its standard input is one line of JSON, the function's argument, and stays open for as long as the
process is to live: with the end of it the process is gone, so it outlives nobody. That the function
has returned is said over a pipe: an exit code of 0 is what `sys.exit()` gives as well.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

from trial_core import text_format

LOOK_SECONDS = 0.1
TAIL_BYTES = 2000

_RETURNED = b"returned"


def call(
    function: str,
    argument: Mapping[str, Any] | None,
    *,
    code: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> str | None:
    """Call a function in a process of its own; what went wrong, None if nothing did.

    Args:
        function: ``module:function``; an ``async def`` is run to its end.
        argument: the only one that it gets; plain data. None: it is not called, only found.
        code: the folder that comes first on its path, and that it runs in.
        log: where its output goes.
        environment: variables for it, over those of this process.
        timeout_seconds: it is broken off after so long; None: never.
        is_unwanted: asked now and then whether to end it as it is.
    """
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    said, says = os.pipe()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trial_core.models.callback_process", function, str(says)],
                cwd=code, env=_environment(environment or {}), pass_fds=[says],
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            _hand_over(process, argument)
            while (code_of_exit := _exit_of(process)) is None:
                if is_unwanted():
                    return "it was broken off: the run was to end"
                if timeout_seconds is not None and time.monotonic() - began >= timeout_seconds:
                    return f"it was broken off: it took longer than {timeout_seconds:g} s"
        finally:
            _end(process)
        if code_of_exit == 0 and _is_there(said, _RETURNED):
            return None
    finally:
        os.close(said)
        os.close(says)
    return _what_went_wrong(code_of_exit, log)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """This process's variables with those that are given; this very package can be found in any
    case, from wherever it runs."""
    merged = {**os.environ, **given}
    path = [str(Path(__file__).parents[2]), *filter(None, [merged.get("PYTHONPATH")])]
    return {**merged, "PYTHONPATH": os.pathsep.join(path)}


def _hand_over(process: subprocess.Popen[bytes], argument: Mapping[str, Any] | None) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it could not begin: its log says why
            process.stdin.write(json.dumps(argument).encode() + b"\n")
            process.stdin.flush()


def _exit_of(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None: it has not ended in a while."""
    try:
        return process.wait(LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _is_there(pipe: int, word: bytes) -> bool:
    """Whether a pipe holds a word. It is not waited for: who writes to it has ended."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, len(word)) == word
    except BlockingIOError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left, nor of what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _what_went_wrong(code: int, log: Path) -> str:
    lines = [line for line in text_format.clean(_tail(log)).splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "it said nothing"
    if code == 0:
        said = "it ended its process (sys.exit, os._exit) instead of returning"
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return f"{said} ({how}; its output: {log})"


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")


def main(name: str, says: int) -> None:
    """What the process does.

    Args:
        says: the pipe over which it says that the function has returned, or was found.
    """
    os.set_inheritable(says, False)
    argument = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_caller, name="caller", daemon=True).start()
    found = _found(name)
    if argument is not None:
        returned = found(argument)
        if inspect.isawaitable(returned):
            asyncio.run(_awaited(returned))
    os.write(says, _RETURNED)


def _found(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise TypeError(f"{name} is a generator: called, it would do nothing")
    return found  # type: ignore[no-any-return]


async def _awaited(result: Awaitable[Any]) -> None:
    await result


def _end_with_the_caller() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.killpg(os.getpgrp(), SIGKILL)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # also where Python was told to leave it out
    main(sys.argv[1], int(sys.argv[2]))
