"""Prefect events about a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.events import Event, RelatedResource, Resource

PROMOTED = "trialflow.model.promoted"
KEPT = "trialflow.model.kept"
DATA_ARRIVED = "trialflow.data.arrived"


def resource_id(model: str) -> str:
    """The id of a model as a Prefect resource."""
    return f"trialflow.model.{model}"


def data_arrived_event(model: str, data: Mapping[str, Any]) -> Event:
    """New data has arrived for a model."""
    return Event(event=DATA_ARRIVED, resource=_resource(model), payload={"data": dict(data)})


def outcome_event(model: str, run_id: str, outcome: Mapping[str, Any]) -> Event:
    """The outcome of a retraining. Its id depends on the run alone, so Prefect drops duplicates."""
    name = PROMOTED if outcome["promoted"] else KEPT
    run = {
        "prefect.resource.id": f"prefect.flow-run.{run_id}",
        "prefect.resource.role": "flow-run",
    }
    return Event(
        id=uuid5(NAMESPACE_URL, f"{name}/{run_id}"),
        event=name,
        resource=_resource(model),
        related=[RelatedResource(run)],
        payload=dict(outcome),
    )


def send(client: SyncPrefectClient, event: Event) -> None:
    """Send an event. Unlike Prefect's `emit_event`, raises httpx.HTTPError if it is refused."""
    answer = client.request("POST", "/events", json=[event.model_dump(mode="json")])
    answer.raise_for_status()


def _resource(model: str) -> Resource:
    return Resource({"prefect.resource.id": resource_id(model), "prefect.resource.name": model})
