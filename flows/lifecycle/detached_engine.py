"""Runs Prefect's engine in a separate session, so that a flow can save after its worker ended.

A process worker that is stopped kills its child processes with SIGKILL at once. With ``python -m
trialflow.flows.lifecycle.detached_engine`` as the `command` of a deployment or a work pool, the
worker's child is the supervisor below. The engine runs in another session, and receives the
supervisor's signals. An engine whose supervisor is gone knows that its worker was stopped:
`stop_monitor` then requests a stop, and the saved run goes back into its queue.

An engine that was killed is started again at once (`restarted_engine`): the worker and the server
do not notice it, and would need a quarter of a minute. If engines end in the same way soon after
their start, as where memory is short, the supervisor pauses, then gives up: the run's state says
why it crashed, and Prefect's automation decides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from uuid import UUID

from rich.console import Console

SUPERVISOR = "TRIALFLOW_SUPERVISOR"
SUPERVISOR_MODULE = "trialflow.flows.lifecycle.detached_engine"
ENGINE = "prefect.engine"
RESTARTED_ENGINE = "trialflow.flows.lifecycle.restarted_engine"
# A machine out of memory also sends SIGKILL. The other signals come from native code.
KILLED = {
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE
}  # fmt: skip
SOON_SECONDS = 60.0
PAUSES_SECONDS = (0.0, 1.0, 4.0, 15.0)
"""Before each start after processes that ended soon; after the last one they are given up."""
# Prefect's connection to the worker, which accepts one engine only.
_CONTROL = ("PREFECT__CONTROL_PORT", "PREFECT__CONTROL_TOKEN")
# Removed from the environment: child processes of this one have another parent.
_supervisor = os.environ.pop(SUPERVISOR, None)


def has_lost_supervisor() -> bool:
    """Return whether a supervisor started this process and has ended since."""
    return _supervisor is not None and os.getppid() != int(_supervisor)


def ignore_broken_output() -> None:
    """Keep this process alive when its output pipe breaks because its worker was killed.

    Prefect prints its log with rich. On a broken pipe rich raises SystemExit in the thread that
    logs: the flow's, or the one that listens to the ranks.
    """
    Console.on_broken_pipe = _silence  # type: ignore[method-assign,assignment]


def _silence(console: Console) -> None:
    console.quiet = True
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), console.file.fileno())


class RestartPauses:
    """Decides when a process that has ended is started again, and when no more.

    At once if it lived for a minute; after a pause if it ended sooner; no more if that has happened
    five times in a row.

    Attributes:
        soon: how many in a row have ended sooner.
    """

    soon = 0

    def pause_seconds(self, lived_seconds: float) -> float | None:
        """Return the pause before the next start, or None if there is to be none."""
        self.soon = self.soon + 1 if lived_seconds < SOON_SECONDS else 0
        if self.soon > len(PAUSES_SECONDS):
            return None
        return PAUSES_SECONDS[self.soon - 1] if self.soon else 0.0


class Supervisor:
    """Runs an engine until it ends by itself, or a signal asks for its end.

    Args:
        arguments: the engine's arguments.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._asked: int | None = None  # the last signal that came
        self._is_asked = threading.Event()
        self._engine: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run engines until one ends for good; return its exit code, as a shell reports it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        restarts = RestartPauses()
        began, code = time.monotonic(), self._ended(ENGINE)
        while -code in KILLED and self._asked is None:
            pause_seconds = restarts.pause_seconds(time.monotonic() - began)
            if pause_seconds is None:
                cause = (
                    f"the run's process was ended by {signal.Signals(-code).name} "
                    f"{restarts.soon} times, each within {SOON_SECONDS:g} s of its start; it is "
                    "not started again here (SIGKILL: also if the machine is out of memory)"
                )
                print(cause, file=sys.stderr)
                self._report_crash(cause)
                break
            if self._is_asked.wait(pause_seconds):
                break
            for name in _CONTROL:
                os.environ.pop(name, None)
            began, code = time.monotonic(), self._ended(RESTARTED_ENGINE, str(-code))
        return code if code >= 0 else 128 - code

    def _ended(self, module: str, *arguments: str) -> int:
        """Run an engine; its exit code, or the negative number of the signal that ended it."""
        self._engine = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, *self._arguments],
            env={**os.environ, SUPERVISOR: str(os.getpid())},
            start_new_session=True,
        )
        if self._asked is not None:  # while it was started
            self._engine.send_signal(self._asked)
        return self._engine.wait()

    def _report_crash(self, cause: str) -> None:
        """Have the run's state say why it crashes, if the server answers."""
        # Imported late: a supervisor is small. The worker reports a crash in any case.
        with suppress(Exception):
            from prefect.client.orchestration import get_client
            from prefect.states import Crashed

            from trialflow.tasks.client_retries import client_retries

            run = self._arguments[0] if self._arguments else os.environ["PREFECT__FLOW_RUN_ID"]
            with client_retries(0), get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(run), Crashed(message=cause))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        self._is_asked.set()
        if self._engine is not None:
            self._engine.send_signal(number)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
