"""`trialflow data-arrived`: tell the Prefect server that a model has new data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


def data_arrived(
    model: str,
    /,
    *,
    data: Annotated[
        list[str] | None,
        Parameter(
            name="--data",
            negative=(),
            help="Where the new data are, as FIELD=VALUE: sets a field of the experiment's `data` "
            "for this retraining only. The value is YAML. May be given several times. Default: the "
            "experiment's `data`.",
        ),
    ] = None,
) -> int:
    """Tell the Prefect server that a model has new data, so that a worker retrains it.

    For example, for an experiment whose `data` has a field `path`:

    `trialflow data-arrived gpt --data path=s3://bucket/2026-11-21`

    This sends the event trialflow.data.arrived to the server that PREFECT_API_URL names; if that is
    not set, to the server of a running `trialflow up`. The model is retrained if its experiment has
    `on_data_arrived: true` and was deployed with `trialflow deploy` or `trialflow up`. To retrain
    on this machine instead: `trialflow retrain`.

    Parameters
    ----------
    model
        The model's name, as in `retraining.model`.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trial_core.checkpoint.layout import checked_model
    from trial_core.models.data_templates import parse_data
    from trialflow.tasks.events import data_arrived_event, send

    checked_model(model)
    new_data = parse_data(data or [])
    event = data_arrived_event(model, new_data)
    with configured_client() as client, waiting("asking the Prefect server"):
        send(client, event)
        if problem := _automation_problem(client, model):
            console.warning(problem)
    where = f": {json.dumps(new_data, ensure_ascii=False)}" if new_data else ""
    print(text_format.clean(f"sent {event.event}: model {model} has new data{where}"))
    return 0


def _automation_problem(client: SyncPrefectClient, model: str) -> str | None:
    """Return why no automation reacts to the event, or None if one does."""
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
