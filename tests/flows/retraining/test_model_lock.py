"""One retraining of a model at a time on a Prefect server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Running

from tests.support.prefect import PrefectServer
from tests.support.retraining import RetrainHarness
from trialflow.flows.retrain import retrain
from trialflow.flows.retraining import model_lock as module
from trialflow.flows.retraining.model_lock import (
    HEARTBEAT_LABEL,
    HEARTBEAT_TIMEOUT,
    MODEL_LABEL,
    OWNER_LABEL,
    AlreadyRetraining,
    model_lock,
)

pytestmark = pytest.mark.server

LIMIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def short_waits(prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    with prefect_server.configured():
        yield


@pytest.fixture
def model() -> str:
    return f"toy-{uuid4().hex[:8]}"


def running_run(**labels: str) -> UUID:
    """A flow run that the server shows as Running."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(retrain, state=Running())
        client.update_flow_run_labels(run.id, dict(labels))
    return run.id


def labels_of(run: UUID) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        return dict(client.read_flow_run(run).labels)


def acquire_and_release(model: str, run: UUID) -> None:
    with model_lock(model, run, wait=True):
        pass


def test_a_second_run_is_refused(model: str) -> None:
    """The error names the run that holds the lock; after its end the lock is free."""
    first, second = running_run(), running_run()
    with (
        model_lock(model, first, wait=False),
        pytest.raises(AlreadyRetraining, match=f"model {model} is already being retrained by "),
        model_lock(model, second, wait=False),
    ):
        pass
    with model_lock(model, second, wait=False), model_lock("other", first, wait=False):
        pass


def test_a_later_attempt_waits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the run that holds the lock has ended; it withdraws its announcement between looks."""
    first, second = running_run(), running_run()
    release, withdrawn = module._ModelLock.release, threading.Event()

    def release_and_look(self: module._ModelLock) -> None:
        release(self)
        if self._run_id == second and labels_of(second).get(HEARTBEAT_LABEL) == "":
            withdrawn.set()

    monkeypatch.setattr(module._ModelLock, "release", release_and_look)
    with ThreadPoolExecutor(1) as pool:
        with model_lock(model, first, wait=False):
            waiting = pool.submit(acquire_and_release, model, second)
            assert withdrawn.wait(LIMIT_SECONDS)
            assert not waiting.done()
        waiting.result(LIMIT_SECONDS)


def test_two_request_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both announce before either looks: one gets the lock, the other is refused."""
    original, both = module._ModelLock._other_runs, threading.Barrier(2)
    has_waited = threading.local()

    def look(self: module._ModelLock) -> list[FlowRun]:
        if not getattr(has_waited, "value", False):
            has_waited.value = True
            both.wait(LIMIT_SECONDS)
        return original(self)

    monkeypatch.setattr(module._ModelLock, "_other_runs", look)
    is_refused = threading.Event()

    def request(run: UUID) -> bool:
        try:
            with model_lock(model, run, wait=False):
                return is_refused.wait(LIMIT_SECONDS)
        except AlreadyRetraining:
            is_refused.set()
            return False

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(request, [running_run(), running_run()]))
    assert sorted(got) == [False, True]


@pytest.mark.parametrize("end", ["crashed", "silent"])
def test_a_dead_run_does_not_hold_the_lock(model: str, end: str) -> None:
    """Prefect shows it as Crashed; or as Running forever, and it sends no heartbeat."""
    age = HEARTBEAT_TIMEOUT if end == "silent" else timedelta(0)
    heartbeat = (datetime.now(timezone.utc) - age).isoformat()
    dead, run = running_run(**{MODEL_LABEL: model, HEARTBEAT_LABEL: heartbeat}), running_run()
    if end == "crashed":
        with pytest.raises(AlreadyRetraining), model_lock(model, run, wait=False):
            pass
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(dead, Crashed(), force=True)
    with model_lock(model, run, wait=False):
        pass


def test_the_heartbeat_is_refreshed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trains longer than the heartbeat timeout keeps its lock."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    refreshed = threading.Semaphore(0)
    original = module._ModelLock._update_labels

    def update(self: module._ModelLock, labels: dict[str, str]) -> None:
        original(self, labels)
        refreshed.release()

    run = running_run()
    with model_lock(model, run, wait=False):
        before = labels_of(run)[HEARTBEAT_LABEL]
        monkeypatch.setattr(module._ModelLock, "_update_labels", update)
        assert refreshed.acquire(timeout=LIMIT_SECONDS)
        assert labels_of(run)[HEARTBEAT_LABEL] > before
    assert labels_of(run)[HEARTBEAT_LABEL] == ""


def test_an_old_attempt_does_not_release_the_lock_of_a_newer_one(model: str) -> None:
    """Both are attempts at the same flow run."""
    run = running_run()
    with model_lock(model, run, wait=False), get_client(sync_client=True) as client:
        client.update_flow_run_labels(run, {OWNER_LABEL: "a newer attempt"})
    assert labels_of(run)[HEARTBEAT_LABEL] != ""


def test_an_overlapping_run_is_skipped(harness: RetrainHarness) -> None:
    """It ends as Skipped, which is a completed state, and stores nothing."""
    second = harness.create_run()

    def overlap(stopping: Any) -> None:
        harness.on_train = lambda stopping: None
        harness.execute_in_thread(second).result(LIMIT_SECONDS)

    harness.on_train = overlap
    assert harness.run().promoted
    assert len(harness.trained) == 1
    name, message = harness.state_of(second)
    assert name == "Skipped"
    assert f"model {harness.model} is already being retrained by retrain {harness.model}" in message
    assert harness.store.storage.sizes(f"models/{harness.model}/retrainings/{second}") == {}
