"""`trialflow data-arrived`: tell the Prefect server that a model has new data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


def data_arrived(
    model: str,
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(
            name=("--data", "--set"),
            negative=(),
            help="Set a field of the experiment's `data` for the run that this starts: "
            "--data path=s3://bucket/2026-11-21. The value is YAML. May be given several times.",
        ),
    ] = None,
) -> int:
    """Retrain a model because data has arrived.

    Sends the event trialflow.data.arrived to the Prefect server that PREFECT_API_URL names. The
    automation of an experiment with `on_data_arrived` then starts a run with this data.

    Parameters
    ----------
    model
        The model's name, as in `retraining.model`.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trial_core.checkpoint.layout import checked_model
    from trial_core.models.data_templates import parse_data
    from trialflow.tasks.model_events import data_arrived_event, resource_id, send

    checked_model(model)
    event = data_arrived_event(model, parse_data(set_ or []))
    with configured_client() as client:
        send(client, event)
        if problem := _automation_problem(client, model):
            console.warning(problem)
    print(f"sent: {event.event} of {resource_id(model)}")
    return 0


def _automation_problem(client: SyncPrefectClient, model: str) -> str | None:
    """Why no automation reacts to the event; None: one does."""
    from trialflow.deployments.retraining.retraining_requests import automation_name

    found = client.read_automations_by_name(automation_name(model))
    if not found:
        return (
            f"no automation of this server retrains {model!r} when data arrives: set "
            "`on_data_arrived: true` in the `retraining` section of its experiment, and deploy it "
            "with `trialflow deploy`"
        )
    if not found[0].enabled:
        return f"the automation {automation_name(model)!r} is paused: no run was started"
    return None
