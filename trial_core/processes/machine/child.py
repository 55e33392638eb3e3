"""A child process: started, given orders as lines, and ended with all that it has started.

A child runs in a session of its own, so that neither a terminal's Ctrl-C nor the end of its
parent's group ends it, unless that is what it is to share. Its standard input holds its orders and
stays open while the parent lives: at its end the child ends too (`end_with_parent`), so it never
outlives a parent that was killed.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.02
REAP_SECONDS = 1.0
LOG_TAIL_BYTES = 4000


class Child:
    """A Python program in a process of its own.

    Args:
        command: the arguments of the interpreter: a script, or ``-m`` and a module, with its own.
        variables: environment variables in addition to those of this process.
        folder: its working folder; by default that of this process.
        log: the file of its output and errors; None for this process's own.
        answers: True if its standard output holds lines for this process instead.
        descriptors: open file descriptors that it inherits.
        own_session: False if it belongs to its parent's session, and is killed with it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        folder: Path | None = None,
        log: IO[bytes] | None = None,
        answers: bool = False,
        descriptors: Sequence[int] = (),
        own_session: bool = True,
    ) -> None:
        self._parent, self._own_session = os.getpid(), own_session
        self._process: subprocess.Popen[bytes] | _Forked = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **(variables or {})}, cwd=folder, pass_fds=descriptors,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE if answers else log, stderr=log,
            start_new_session=own_session,
        )  # fmt: skip

    @classmethod
    def of_fork(cls, pid: int) -> Child:
        """A child that this process has forked, in its own session. It has no pipes."""
        child = cls.__new__(cls)
        child._parent, child._own_session = os.getpid(), False
        child._process = _Forked(pid)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of a signal; None until it is reaped."""
        return self._process.returncode

    @property
    def input(self) -> IO[bytes]:
        return _there(self._process.stdin)

    @property
    def output(self) -> IO[bytes]:
        """Its standard output, if it answers."""
        return _there(self._process.stdout)

    def tell(self, data: bytes) -> bool:
        """Write to its standard input. Return False if it has ended, or has closed it."""
        try:
            self.input.write(data)
            self.input.flush()
        except BrokenPipeError:
            return False
        return True

    def wake(self, data: bytes) -> None:
        """Write to its standard input; nothing if the pipe is full, which is enough to wake it."""
        with suppress(BlockingIOError, BrokenPipeError, ValueError):  # full, ended, or closed
            os.set_blocking(self.input.fileno(), False)
            os.write(self.input.fileno(), data)

    def lines(self) -> Iterator[bytes]:
        """Its answers, until it ends."""
        yield from self.output

    def lives(self) -> bool:
        """Return whether it has not ended. Its id stays its own until it is reaped."""
        if self.exit_code is not None:
            return False
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # `Popen.poll` would free the id
        try:
            return os.waitid(os.P_PID, self.pid, options) is None
        except ChildProcessError:  # another part of this program waits for all children, or ignores
            self._process.poll()  # SIGCHLD: then the exit code is 0
            return False

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.lives():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(POLL_SECONDS, seconds))
        return True

    def close_input(self) -> None:
        """Tell it that no more orders come."""
        if self._process.stdin is not None:
            with suppress(OSError):  # unsent bytes
                self._process.stdin.close()

    def reap(self, seconds: float = math.inf) -> bool:
        """Wait for its end, and take its exit code. Return False if it has not ended."""
        if self.wait(seconds):
            self._process.poll()
        return self.exit_code is not None

    def kill_only(self) -> None:
        """SIGKILL it, and its group if it has one; the caller reaps it. From any thread.

        Not if it is reaped: its id may be another process's. Nor in a forked process, which may
        unwind through its parent's blocks.
        """
        if self.exit_code is None and os.getpid() == self._parent:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if self._own_session else os.kill)(self.pid, signal.SIGKILL)

    def kill(self, reap_seconds: float = REAP_SECONDS) -> bool:
        """As `kill_only`, and reap it. Return False if it is left: it hangs in a system call."""
        self.kill_only()
        is_reaped = self.reap(reap_seconds)
        self.close_input()
        return is_reaped

    def end(self, seconds: float) -> bool:
        """Close its input and wait for its end. Return False if it did not end, and was killed.

        The processes that it has left stay, unless it has to be killed.
        """
        self.close_input()
        if not self.wait(seconds):
            self.kill()
            return False
        self.reap()
        return True


class _Forked:
    """A forked process, with the used part of `subprocess.Popen`. Not of `multiprocessing`, whose
    children programs wait for or end."""

    stdin = stdout = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the program has waited for it
                self.returncode = 0
                return
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the child was started without this pipe")
    return pipe


def end_with_parent() -> None:
    """In a child that has read its orders: end with its whole group once its parent is gone."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def describe_exit(exit_code: int) -> str:
    """The text that follows "the process": "ended with exit code 3", "was ended by SIGKILL"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def log_tail(log_path: Path) -> str:
    """The end of a log, for an error message."""
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace").strip()
    return f"its log {log_path} ends with:\n{tail}" if tail else f"its log: {log_path}"
