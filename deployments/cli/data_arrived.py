"""`trialflow data-arrived`: tell the Prefect server that there is new data for a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.errors import ConfigError
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
            metavar="KEY=VALUE",
            negative=(),
            help="A field of the experiment's `data` in the run that this starts: "
            "--data path=s3://bucket/2026-11-21. The value is YAML. May be given several times.",
        ),
    ] = None,
) -> int:
    """Retrain a model because data has arrived.

    Sends the event trialflow.data.arrived to the Prefect server that PREFECT_API_URL names, where
    the automation of an experiment with `on_data_arrived` starts a run with the data.

    Parameters
    ----------
    model
        The model's name, as in `retraining.model`.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trialflow.deployments.retraining.requests import arrival, resource_id

    _check_name(model)
    data = _data(set_ or [])
    with configured_client() as client:
        event = arrival(model, data)
        # Not Prefect's emit_event, which does not say whether the server has taken it.
        client.request("POST", "/events", json=[event.model_dump(mode="json")]).raise_for_status()
        if problem := _nobody_listens(client, model):
            console.warning(problem)
    print(f"sent: {event.event} of {resource_id(model)}")
    return 0


def _check_name(model: str) -> None:
    from trial_core.checkpoint.layout import is_name

    if not is_name(model):
        raise ConfigError(
            f"{model!r} cannot be a model's name: letters, digits, and within them dots, dashes "
            "and underscores"
        )


def _data(assignments: list[str]) -> dict[str, Any]:
    """What `--data` gives, as JSON has it.

    Raises:
        ConfigError: an assignment cannot be understood.
    """
    from trial_core.config.parsing import override

    data = override({}, assignments, "--data")
    if not _is_json(data):
        raise ConfigError("--data: expected text, numbers, lists and mappings: an event is JSON")
    return data


def _is_json(value: Any) -> bool:
    """Whether JSON has it: neither NaN nor infinity, and keys are text."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return not isinstance(value, float) or math.isfinite(value)


def _nobody_listens(client: SyncPrefectClient, model: str) -> str | None:
    """What is said if no automation of ours acts on the event; None: one does."""
    from trialflow.deployments.retraining.requests import rule_name

    found = client.read_automations_by_name(rule_name(model))
    if not found:
        return (
            f"no automation of this server retrains {model!r} when data arrives: set "
            "`on_data_arrived: true` in the `retraining` section of its experiment, and "
            "`trialflow deploy` that"
        )
    if not found[0].enabled:
        return f"the automation {rule_name(model)!r} is paused: nothing is run"
    return None
