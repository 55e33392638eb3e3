"""`trialflow join`: this machine trains for a driver elsewhere."""

from __future__ import annotations

from pathlib import Path

from trialflow.deployments.cli import console
from trialflow.deployments.cli.json_output import AsJson, print_json, stdout_for_json


def join(
    *,
    driver: str,
    token_file: Path | None = None,
    slots: int | None = None,
    wait_seconds: float = 300.0,
    json_: AsJson = False,
) -> int:
    """Train on this machine for a run that was started elsewhere with resources.engine: join.

    Starts ranks, watches them, and ends when the run has ended, or when its driver is gone. Run it
    on each machine by hand, ssh, mpirun, torchrun or a Kubernetes job. At SIGTERM or Ctrl-C, or
    when its terminal is closed, the run saves and continues without this machine; at the second
    such signal, this machine leaves at once.

    Args:
        driver: Where the run's driver listens, as it shows it: tls://HOST:PORT. Several addresses
            are tried in their order: tls://HOST:PORT,HOST:PORT.
        token_file: A file with the run's token, as the driver has it. Default: the token is read
            from standard input.
        slots: How many ranks to start here. Default: as the experiment says, else one per
            accelerator, or two on the CPU.
        wait_seconds: How long to try while the driver cannot be reached.
    """
    from trial_core.processes.nodes.agent_main import run_agent
    from trial_core.processes.nodes.join_token import read_token

    console.show_log()
    token = read_token(token_file)
    with stdout_for_json(json_):
        code = run_agent(driver, token, slots=slots, wait_seconds=wait_seconds)
    if json_:
        print_json("join", {"driver": driver, "has_left": bool(code)})
    console.note("this node has left the run" if code else "the driver needs this node no longer")
    return code
