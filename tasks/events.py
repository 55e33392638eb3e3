"""Our Prefect events about models, checkpoints and runs. docs/reference/events.md lists them.

Events about a model are sent by tasks, which raise if the server refuses them. Those about a run
are sent by an observer of its driver, in the background: they neither stop nor slow training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.events import Event, RelatedResource, Resource
from prefect.events.utilities import emit_event
from prefect.exceptions import EventTooLarge
from prefect.logging import get_logger, get_run_logger

from trial_core.checkpoint.store import CheckpointStore
from trial_core.common import text_format
from trial_core.config import ExperimentConfig
from trial_core.errors import TrialflowError
from trial_core.messages import MetricsKind
from trial_core.models.records import Move
from trial_core.models.registry import Registry
from trial_core.observe.events.observers import Observer
from trial_core.observe.trackers.model_registry import NOT_SHOWN, NotShown, show_champion
from trial_core.observe.trackers.tracking import trackers_of

PROMOTED = "trialflow.model.promoted"
KEPT = "trialflow.model.kept"
CHAMPION = "trialflow.champion.promoted"
DATA_ARRIVED = "trialflow.data.arrived"
COMMITTED = "trialflow.checkpoint.committed"
STALLED = "trialflow.run.stalled"
RESTARTING = "trialflow.run.restarting"

# Validations whose checkpoint is not committed yet.
MAX_PENDING = 32
MAX_REASON = 2000


def resource_id(model: str) -> str:
    return f"trialflow.model.{model}"


def data_arrived_event(model: str, data: Mapping[str, Any]) -> Event:
    return Event(event=DATA_ARRIVED, resource=_resource(model), payload={"data": dict(data)})


def outcome_event(model: str, run_id: str, outcome: Mapping[str, Any]) -> Event:
    """Return a retraining's outcome event. Its id is the run's alone, so Prefect drops duplicates.

    Args:
        run_id: see `RetrainingRun`; not the flow run's id if another flow calls that run.
    """
    name = PROMOTED if outcome["promoted"] else KEPT
    run = {
        "prefect.resource.id": f"prefect.flow-run.{outcome['flow_run_id']}",
        "prefect.resource.role": "flow-run",
    }
    return Event(
        id=uuid5(NAMESPACE_URL, f"{name}/{run_id}"),
        event=name,
        resource=_resource(model),
        related=[
            RelatedResource(run), *_related(outcome["trial"], checkpoint=outcome["checkpoint_uuid"])
        ],
        payload=dict(outcome),
    )  # fmt: skip


def champion_event(registry: Registry, move: Move) -> Event:
    """Return the event of a new champion, whoever moved it. Its id depends on the move alone.

    Raises:
        RegistryError, StorageError: the version of the champion cannot be read.
    """
    version = registry.version(move.model, move.champion)
    return Event(
        id=uuid5(NAMESPACE_URL, f"{CHAMPION}/{registry.store.url}/{move.model}/{move.number}"),
        event=CHAMPION,
        resource=_resource(move.model),
        related=_related(version.trial, version.experiment, version.checkpoint),
        payload={
            "model": move.model, "kind": move.kind, "version": move.champion,
            "previous": move.previous, "checkpoint": version.checkpoint, "trial": version.trial,
            "experiment": version.experiment, "batches": version.batches_trained,
            "files": registry.store.files_url(version.checkpoint), "metric": version.metric,
            "value": version.value, "why": move.why, "by": move.by, "at": move.at,
        },
    )  # fmt: skip


def tell_champion(registry: Registry, move: Move, config: ExperimentConfig) -> None:
    """Report a move from a task: by an event, in the background, and in MLflow's registry.

    A failure to report does not undo the move.
    """
    logger = get_run_logger()
    try:
        event = champion_event(registry, move)
    except TrialflowError as error:
        logger.warning("no event tells of the new champion: %s", error)
    else:
        _emit(event)
    try:
        if shown := show_champion(registry, move.model, trackers_of(config)):
            logger.info("MLflow's registry shows the champion: %s", shown)
    except (NotShown, TrialflowError) as error:
        logger.warning("%s: %s", NOT_SHOWN, error)


def send(client: SyncPrefectClient, event: Event) -> None:
    """Send an event. Unlike Prefect's `emit_event`, raises httpx.HTTPError if it is refused."""
    answer = client.request("POST", "/events", json=[event.model_dump(mode="json")])
    answer.raise_for_status()


class RunEvents(Observer):
    """Sends the events of a run: a checkpoint is committed, its ranks hang or are launched again.

    Prefect's worker sends them, from a queue, and relates them to the flow run.
    """

    def __init__(self, config: ExperimentConfig, trial: str) -> None:
        place = config.checkpoint_storage
        self._store = CheckpointStore(place.url, place.options)
        self._experiment = config.name
        self._trial = trial
        self._batches = 0
        self._validations: dict[int, dict[str, float | None]] = {}

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self._batches = begins_at

    def batches_trained(self, batches: int) -> None:
        self._batches = batches

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        if kind == "validation":
            self._validations[batches] = text_format.finite_numbers(metrics)
            if len(self._validations) > MAX_PENDING:
                del self._validations[next(iter(self._validations))]

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        payload = {
            "checkpoint": uuid, "trial": self._trial, "experiment": self._experiment,
            "batches": batches, "size_bytes": total_bytes, "files": self._store.files_url(uuid),
            "metrics": self._validations.get(batches, {}),
        }  # fmt: skip
        _emit(Event(
            id=uuid5(NAMESPACE_URL, f"{COMMITTED}/{uuid}"),
            event=COMMITTED,
            resource=_named(f"trialflow.checkpoint.{uuid}", uuid),
            related=_related(self._trial, self._experiment),
            payload=payload,
        ))  # fmt: skip

    def stalled(self, during: str, seconds: float, reason: str) -> None:
        self._tell(STALLED, {"during": during, "seconds": seconds}, reason)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._tell(RESTARTING, {"restart": attempt, "max_restarts": max_restarts}, reason)

    def _tell(self, event: str, facts: Mapping[str, Any], reason: str) -> None:
        payload = {
            "trial": self._trial, "experiment": self._experiment, "batches": self._batches, **facts,
            "reason": text_format.one_line(reason)[:MAX_REASON],
        }  # fmt: skip
        resource = _named(f"trialflow.trial.{self._trial}", self._trial)
        related = _related(experiment=self._experiment)
        _emit(Event(event=event, resource=resource, related=related, payload=payload))


def _emit(event: Event) -> None:
    """Have Prefect's worker send an event."""
    try:
        emit_event(
            event.event, event.resource.root,
            related=event.related, payload=event.payload, id=event.id,
        )  # fmt: skip
    except EventTooLarge as error:
        get_logger(__name__).warning("event %s is not sent: %s", event.event, error)


def _related(trial: str = "", experiment: str = "", checkpoint: str | None = None) -> Any:
    named = {"trial": trial, "experiment": experiment, "checkpoint": checkpoint}
    return [
        RelatedResource(
            {**_named(f"trialflow.{role}.{name}", name).root, "prefect.resource.role": role}
        )
        for role, name in named.items()
        if name
    ]


def _resource(model: str) -> Resource:
    return _named(resource_id(model), model)


def _named(resource: str, name: str) -> Resource:
    return Resource({"prefect.resource.id": resource, "prefect.resource.name": name})
