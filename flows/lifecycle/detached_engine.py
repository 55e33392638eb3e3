"""What lets a flow's process end in its own time when its worker has ended before it.

``python -m trialflow.flows.lifecycle.detached_engine`` is Prefect's engine, which a worker that is stopped does not kill. A
process worker ends what it has started by SIGKILL as soon as it is stopped itself, so that its
flows could not save. As the `command` of a deployment, or of its work pool, this module stands
between: it is what the worker starts, signals and kills, while the engine runs in a session of its
own. Signals are handed on; and an engine whose keeper is gone knows that its worker was stopped:
`trialflow.flows.lifecycle.stop_monitor` then saves, and puts the run back into its queue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from rich.console import Console

KEEPER = "TRIALFLOW_KEEPER"
# Taken out of the environment: what this process starts has another parent, and no keeper.
_keeper = os.environ.pop(KEEPER, None)


def has_lost_its_keeper() -> bool:
    """Whether this process was started by `main`, in a process that has ended since."""
    return _keeper is not None and os.getppid() != int(_keeper)


def outlive_whoever_reads_the_output() -> None:
    """Have this process go on when nobody reads what it prints any more: its worker was killed.

    Prefect prints its log with rich, which then raises SystemExit in whatever thread logs: in the
    flow, or in the one that hears the ranks.
    """
    Console.on_broken_pipe = _print_nothing  # type: ignore[method-assign,assignment]


def _print_nothing(console: Console) -> None:
    console.quiet = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), console.file.fileno())


def main() -> int:
    """Run the engine; its exit code, as a shell would have it."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "prefect.engine", *sys.argv[1:]],
        env={**os.environ, KEEPER: str(os.getpid())},
        start_new_session=True,
    )

    def hand_on(number: int, frame: FrameType | None) -> None:
        engine.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    code = engine.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
