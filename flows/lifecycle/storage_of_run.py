"""The storage that a flow run has begun with, by its mark, in a label of the flow run.

A retry may run on a machine where the folder is not mounted. Then nothing there says that the flow
run has already trained, but the server does.
"""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger

from trial_core.errors import Stopped, TrialflowError
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle.server_outage import RETRY_SECONDS, ServerOutage
from trialflow.flows.server.embedded_server import is_unauthorized
from trialflow.tasks.client_retries import NO_ANSWER, client_retries

LABEL = "trialflow.storage"
FIRST_RETRIES = 3


def storage_of_run(limit_seconds: float | None, stopping: StopHandler | None = None) -> str | None:
    """Return the mark of the storage that this flow run began with; None if it has not begun.

    Args:
        limit_seconds: how long to wait for a server that does not answer; None for no limit.
        stopping: a stop request ends the wait.

    Raises:
        TrialflowError: the server has not answered, or refuses this run's password.
        Stopped: the run was asked to stop meanwhile.
    """
    outage = ServerOutage(limit_seconds)
    while True:
        try:
            with client_retries(0), get_client(sync_client=True) as client:
                mark = client.read_flow_run(_run_id()).labels.get(LABEL)
            return None if mark is None else str(mark)
        except NO_ANSWER as error:
            outage.did_not_answer(0)
            if outage.is_too_long or is_unauthorized(error):
                raise TrialflowError(
                    "the run does not begin: only the Prefect server knows whether an earlier "
                    "attempt has trained in another storage, and it has not answered within "
                    f"stopping.server_outage_seconds ({limit_seconds}): {error}. Retry the run "
                    "when the server answers"
                ) from error
            if stopping is not None and stopping.request is not None:
                raise Stopped("nothing was begun: the server did not answer") from error
            time.sleep(RETRY_SECONDS)


class StorageLabel:
    """Stores the mark of the storage on the server, for later attempts of this flow run."""

    def __init__(self) -> None:
        self._unsent: str | None = None

    def note(self, mark: str) -> None:
        """Write the label. A server that does not take it costs a warning."""
        self._unsent = mark
        self.send(retries=FIRST_RETRIES)  # a busy server answers that its database is locked
        if self._unsent is not None:
            get_run_logger().warning(
                "the server has not noted the run's storage, and gets it with the next report; a "
                "retry before that begins again where the storage is not mounted"
            )

    def send(self, retries: int = 0) -> None:
        """Write the label if the server has not taken it yet: one request, which may fail."""
        if (mark := self._unsent) is not None:
            with (
                suppress(*NO_ANSWER),
                client_retries(retries),
                get_client(sync_client=True) as client,
            ):
                client.update_flow_run_labels(_run_id(), {LABEL: mark})
                self._unsent = None


def _run_id() -> UUID:
    return UUID(str(runtime.flow_run.id))
