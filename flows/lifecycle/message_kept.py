"""Sets the message of a cancelled run again, after Prefect's runner has replaced it.

    python -m trialflow.flows.lifecycle.message_kept FLOW_RUN MESSAGE

After a Cancel, the runner of a process worker or of `flow.serve()` waits until the run's process
has ended, and then sets Cancelled by force, with a message that says nothing of the checkpoint. So
the run starts this process, in a session that the runner does not end. It outlives the run by a few
seconds: until it has spoken last, or for a minute.
"""

from __future__ import annotations

import os
import sys
import time
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from trial_core.processes.machine.child import Child

MODULE = "trialflow.flows.lifecycle.message_kept"
LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.5


def keep_message(message: str) -> None:
    """Have the Cancelled state of this flow run keep its message, if a runner has started the run.

    Raises:
        OSError: no process can be started.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or os.environ.get("PREFECT__FLOW_RUN_ID") != str(run.id):
        return
    with open(os.devnull, "wb") as quiet:  # the runner reads this process's output to its end
        Child(["-m", MODULE, str(run.id), message], log=quiet)


def main() -> None:
    """Wait for the other message, and set the state again."""
    flow_run_id, message = UUID(sys.argv[1]), sys.argv[2]
    deadline = time.monotonic() + LIMIT_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run_id).state
            if state is None or state.type != StateType.CANCELLED:
                return  # it runs again
            if state.message != message:
                client.set_flow_run_state(flow_run_id, Cancelled(message=message), force=True)
                return
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
