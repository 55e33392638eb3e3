"""A flow that a command runs in this process, on the configured Prefect server or on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trial_core.errors import Stopped
from trialflow.deployments.cli.run_display import Display

Result = TypeVar("Result")


def run_flow(display: Display, call: Callable[[], Result]) -> Result:
    """What `call` returns, which imports a flow and calls it; `display` shows how it goes.

    Raises:
        Stopped: somebody has stopped it in Prefect.
        TrialflowError: whatever made it fail.
    """
    from trialflow.flows.server.embedded import prefect_api
    from trialflow.flows.server.prefect_server import PrefectServerError

    display.waiting_for("starting Prefect")
    with display, prefect_api() as api:
        import httpx
        from prefect.exceptions import Abort, CancelledRun, Pause

        from trial_core.run.observer import observing

        display.waiting_for("starting the ranks")
        try:
            with observing(display):
                return call()
        except (Abort, CancelledRun, Pause) as stop:
            raise Stopped("the run was stopped in Prefect") from stop
        except httpx.HTTPError as error:  # only Prefect's client raises these in this process
            raise PrefectServerError(
                f"the Prefect server at {api.api_url} failed during the run "
                f"({type(error).__name__}: {error})"
            ) from error
