"""Runs Prefect's engine in a separate session, so that a flow can save after its worker ended.

A process worker that is stopped kills its child processes with SIGKILL at once. With ``python -m
trialflow.flows.lifecycle.detached_engine`` as the `command` of a deployment or a work pool, the
worker's child is the supervisor below. The engine runs in another session, and receives the
supervisor's signals. An engine whose supervisor is gone knows that its worker was stopped:
`stop_monitor` then requests a stop, and the saved run goes back into its queue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from rich.console import Console

SUPERVISOR = "TRIALFLOW_SUPERVISOR"
# Removed from the environment: child processes of this one have another parent.
_supervisor = os.environ.pop(SUPERVISOR, None)


def has_lost_supervisor() -> bool:
    """Whether a supervisor started this process, and has ended since."""
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


def main() -> int:
    """Run the engine as its supervisor. Return its exit code, as a shell reports it."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "prefect.engine", *sys.argv[1:]],
        env={**os.environ, SUPERVISOR: str(os.getpid())},
        start_new_session=True,
    )

    def forward(number: int, frame: FrameType | None) -> None:
        engine.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    code = engine.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
