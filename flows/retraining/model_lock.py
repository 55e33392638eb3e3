"""One retraining of a model at a time on a Prefect server.

Runs announce themselves in labels of their flow run and read the labels of other running runs::

    trialflow.retrains        model
    trialflow.retrains-at     heartbeat: ISO 8601, UTC; empty: no announcement
    trialflow.retrains-phase  requesting or holding
    trialflow.retrains-owner  which attempt at the run wrote the announcement

A run first announces that it requests the lock, then looks for other announcements. It holds the
lock when there is no other. Of two runs that request at once, at least one sees the other; the one
with the lower id looks again, the other withdraws. So two runs never both hold the lock.

The lock saves GPU time. That only one run moves the champion is ensured by the registry.
"""

from __future__ import annotations

import contextvars
import time
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from threading import Event, Thread
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_run_logger

from trial_core.errors import TrialflowError
from trialflow.flows.lifecycle.flow_run_state import requeue_if_stopped
from trialflow.tasks.client_retries import NO_ANSWER, client_retries

FLOW = "retrain"
MODEL_LABEL = "trialflow.retrains"
HEARTBEAT_LABEL = "trialflow.retrains-at"
PHASE_LABEL = "trialflow.retrains-phase"
OWNER_LABEL = "trialflow.retrains-owner"
REQUESTING, HOLDING = "requesting", "holding"

HEARTBEAT_SECONDS = 20.0
# Prefect shows a run that was started by hand and killed as running forever. Without a heartbeat
# for this long it counts as dead.
HEARTBEAT_TIMEOUT = timedelta(minutes=3)
RETRY_SECONDS = 0.5
WAIT_SECONDS = 5.0
_JOIN_SECONDS = 5.0


class AlreadyRetraining(TrialflowError):
    """Another run retrains the model."""


@contextmanager
def model_lock(model: str, run_id: UUID, wait: bool) -> Iterator[None]:
    """Hold the lock of a model for the length of the block.

    An embedded server lives for one run: there is no other run to wait for, and no lock.

    Args:
        run_id: id of this flow run.
        wait: True to wait until another run ends.

    Raises:
        AlreadyRetraining: another run holds the lock, and `wait` is False.
    """
    with get_client(sync_client=True) as client:
        if not _runs_background_services(client):
            yield
            return
        lock = _ModelLock(client, model, run_id)
        try:
            with requeue_if_stopped("another retraining"):
                lock.acquire(wait)
            with lock.heartbeat():
                yield
        finally:
            lock.release()


class _ModelLock:
    """The announcement of one attempt at a run."""

    def __init__(self, client: SyncPrefectClient, model: str, run_id: UUID) -> None:
        self._client = client
        self._model = model
        self._run_id = run_id
        self._owner = uuids.uuid4().hex

    def acquire(self, wait: bool) -> None:
        was_logged = False
        while True:
            # Before every look: other runs ignore an announcement without a recent heartbeat.
            self._announce(REQUESTING)
            if not (others := self._other_runs()):
                self._announce(HOLDING)
                return
            if not any(self._has_priority(run) for run in others):
                time.sleep(RETRY_SECONDS)  # until they withdraw
                continue
            names = ", ".join(run.name for run in others)
            if not wait:
                raise AlreadyRetraining(
                    f"model {self._model} is already being retrained by {names}"
                )
            if not was_logged:
                was_logged = True
                get_run_logger().info(
                    "waiting for %s to finish retraining model %s", names, self._model
                )
            self.release()
            time.sleep(WAIT_SECONDS)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Refresh the announcement in a thread for the length of the block."""
        ended = Event()

        def beat() -> None:
            pause = HEARTBEAT_SECONDS
            while not ended.wait(pause):
                pause = HEARTBEAT_SECONDS
                try:
                    with client_retries(0):
                        self._update_labels({HEARTBEAT_LABEL: _now()})
                except NO_ANSWER as error:
                    pause = RETRY_SECONDS
                    get_run_logger().debug("heartbeat of model %s: %s", self._model, error)

        # The context carries this run's Prefect settings and logger.
        context = contextvars.copy_context()
        thread = Thread(target=context.run, args=(beat,), name="retrain-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_JOIN_SECONDS)

    def release(self) -> None:
        """Withdraw the announcement, unless a newer attempt at this run has replaced it."""
        try:
            labels = self._client.read_flow_run(self._run_id).labels
            if labels.get(OWNER_LABEL) == self._owner:
                self._update_labels({HEARTBEAT_LABEL: ""})
        except NO_ANSWER as error:
            get_run_logger().warning(
                "other retrainings of model %s may be skipped for up to %d minutes: this run "
                "could not release its lock: %s",
                self._model, HEARTBEAT_TIMEOUT.total_seconds() // 60, error,
            )  # fmt: skip

    def _announce(self, phase: str) -> None:
        mine = {MODEL_LABEL: self._model, PHASE_LABEL: phase, OWNER_LABEL: self._owner}
        self._update_labels({**mine, HEARTBEAT_LABEL: _now()})

    def _update_labels(self, labels: dict[str, str]) -> None:
        self._client.update_flow_run_labels(self._run_id, dict(labels))

    def _other_runs(self) -> list[FlowRun]:
        """Other live runs that request or hold the lock, and had a heartbeat not long ago."""
        lives = {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
        live = self._client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": [FLOW]}}),
            flow_run_filter=FlowRunFilter.model_validate(lives),
        )
        return [
            run
            for run in live
            if run.id != self._run_id
            and run.labels.get(MODEL_LABEL) == self._model
            and (beat := str(run.labels.get(HEARTBEAT_LABEL, "")))
            and datetime.now(timezone.utc) - datetime.fromisoformat(beat) < HEARTBEAT_TIMEOUT
        ]

    def _has_priority(self, other: FlowRun) -> bool:
        return other.labels.get(PHASE_LABEL) != REQUESTING or other.id < self._run_id


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _runs_background_services(client: SyncPrefectClient) -> bool:
    """Return whether the server ends expired leases, as a server that outlives a run does."""
    try:
        settings = client.request("GET", "/admin/settings").json()
        return bool(settings["server"]["services"]["repossessor"]["enabled"])
    except (httpx.HTTPError, KeyError, ValueError):
        return True
