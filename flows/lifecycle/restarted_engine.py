"""Prefect's engine for a flow run whose engine was killed: it continues the same run in its place.

    python -m trialflow.flows.lifecycle.restarted_engine SIGNAL [FLOW_RUN]

`detached_engine` starts it. It acts at once, where the automation `RESTART_CRASHED` needs a quarter
of a minute, and only on runs that the automation would schedule again. Other runs end with
the exit code of the signal, which the worker reports as a crash.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.logging.configuration import setup_logging
from prefect.logging.loggers import flow_run_logger
from prefect.states import Pending

from trialflow.flows.lifecycle.crash_limit import RESTARTED, may_begin_again
from trialflow.flows.lifecycle.detached_engine import ENGINE
from trialflow.tasks.client_retries import NO_ANSWER


def take_again(flow_run_id: UUID) -> FlowRun | None:
    """Set a running flow run to Pending, as a worker does that takes it; None if it must not begin
    again."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        if run.state is None or run.state.type != StateType.RUNNING:
            return None
        if not may_begin_again(client, run):
            return None
        # One state: a crash would trigger the automation too. By force: Prefect lets nobody take a
        # running flow run.
        pending: State[Any] = Pending(message=RESTARTED)
        # The run keeps its place in the deployment's concurrency limit.
        lease = run.state.state_details.deployment_concurrency_lease_id
        pending.state_details.deployment_concurrency_lease_id = lease
        client.set_flow_run_state(flow_run_id, pending, force=True)
    return run


def main() -> None:
    """Take the run again and run Prefect's engine in this process."""
    number = signal.Signals(int(sys.argv.pop(1)))
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ["PREFECT__FLOW_RUN_ID"]
    try:
        run = take_again(UUID(given))
    except NO_ANSWER as error:
        print(f"the run cannot begin again: {error}", file=sys.stderr)
        run = None
    if run is None:
        sys.exit(128 + number)
    setup_logging()
    flow_run_logger(run).warning(
        "the run's process was ended by %s (SIGKILL: also if the machine is out of memory): it "
        "begins again, from its last committed checkpoint", number.name,
    )  # fmt: skip
    runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
