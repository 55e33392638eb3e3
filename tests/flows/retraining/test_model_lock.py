"""One retraining of a model at a time, whoever has crashed and whatever the server has forgotten;
ranks are stood in for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.states import Crashed, Running

import trialflow.flows.retraining.model_lock
from tests.support.prefect import PrefectServer
from tests.support.retraining import Bench
from trial_core.run.stop_request import StopHandler
from trialflow.flows.retraining.model_lock import (
    BEAT_LABEL,
    LEASE_LABEL,
    MODEL_LABEL,
    SILENCE,
    limit_of,
)

pytestmark = pytest.mark.server

WAIT_SECONDS = 60.0


@pytest.fixture
def bench(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A model without versions, whose limit is there."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trialflow.flows.retraining.model_lock, "SAYING_SECONDS", 0.5)
    monkeypatch.setattr(trialflow.flows.retraining.model_lock, "WAIT_SECONDS", 0.2)
    bench = Bench(prefect_server, tmp_path)
    bench.stand_in(monkeypatch)
    with prefect_server.configured():
        with get_client(sync_client=True) as client:
            trialflow.flows.retraining.model_lock._make(client, limit_of(bench.model), 1)
        yield bench


def take(bench: Bench) -> UUID:
    """Take the place as a run does; the lease."""
    with get_client(sync_client=True) as client:
        answer = client.increment_concurrency_slots_with_lease(
            names=[limit_of(bench.model)], slots=1, mode="concurrency", lease_duration=60
        )
    return UUID(answer.json()["lease_id"])


def forget(bench: Bench) -> None:
    """Take the place as one that a server has forgotten whose it was."""
    with get_client(sync_client=True) as client:
        client.increment_concurrency_slots([limit_of(bench.model)], 1, "concurrency")


def free_by_name(bench: Bench) -> None:
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots([limit_of(bench.model)], 1, 1.0)


def places(bench: Bench) -> tuple[int, int]:
    """How many are taken, and how many there are."""
    with get_client(sync_client=True) as client:
        limit = client.read_global_concurrency_limit_by_name(limit_of(bench.model))
    return limit.active_slots, limit.limit


def at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two runs find two free places, at the same moment."""
    with get_client(sync_client=True) as client:
        client.update_global_concurrency_limit(
            limit_of(bench.model), GlobalConcurrencyLimitUpdate(limit=2)
        )
    original, both = trialflow.flows.retraining.model_lock._has_taken, threading.Barrier(2)
    waited: set[int] = set()

    def taking(taken: ExitStack, model: str) -> bool:
        if threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            both.wait(WAIT_SECONDS)
        return original(taken, model)

    monkeypatch.setattr(trialflow.flows.retraining.model_lock, "_has_taken", taking)


def say(run: UUID, **labels: Any) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(run, labels)


def name_of(bench: Bench, run: UUID) -> str:
    return bench.state(run)[0]


def test_a_place_that_nobody_has(bench: Bench) -> None:
    """A server that was restarted may have forgotten whose it was: retraining goes on, and then
    the place is free."""
    forget(bench)
    assert bench.run().promoted
    assert places(bench) == (0, 1)


def test_a_dead_runs_lease_ends_while_another_run_works(bench: Bench) -> None:
    """It gives nobody else's place back: the dead run's next attempt waits, a third is skipped."""
    crashed, third = bench.create(), bench.create()
    lease = take(bench)
    say(crashed, **{MODEL_LABEL: bench.model, LEASE_LABEL: str(lease)})
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(crashed, Crashed(), force=True)
    passed: list[bool] = []
    inside = threading.Semaphore(1)

    def work(stopping: StopHandler) -> None:
        bench.act = lambda stopping: passed.append(inside.acquire(blocking=False))
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(lease)  # as when it has run out
        assert places(bench) == (1, 1)
        with inside:
            bench.beside(third).result(WAIT_SECONDS)
            bench.beside(crashed).result(WAIT_SECONDS)

    bench.act = work
    assert bench.run().promoted
    assert (name_of(bench, third), name_of(bench, crashed)) == ("Skipped", "Skipped")
    assert passed == []


def test_a_place_that_is_given_back_twice(bench: Bench) -> None:
    """Whoever has given it back: the run that works says that it does, and is believed."""
    second = bench.create()

    def work(stopping: StopHandler) -> None:
        free_by_name(bench)
        bench.beside(second).result(WAIT_SECONDS)

    bench.act = work
    bench.run()
    assert name_of(bench, second) == "Skipped"
    assert len(bench.trained) == 1


def test_a_limit_that_is_just_being_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """For that moment there is none: nobody passes for that."""
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(bench.create()))
    with get_client(sync_client=True) as client:
        client.delete_global_concurrency_limit_by_name(limit_of(bench.model))
    with ExitStack() as taken:
        assert not trialflow.flows.retraining.model_lock._has_taken(taken, bench.model)


@pytest.mark.parametrize(
    "stale", ["the place", "the count", pytest.param("nothing", marks=pytest.mark.long)]
)
def test_two_begin_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, stale: str) -> None:
    """One retrains the model, the other is skipped; also where both find a place that nobody has
    any more, or where there is a place for each."""
    if stale == "the place":
        forget(bench)
    elif stale == "the count":
        at_once(bench, monkeypatch)
    runs = [bench.create(), bench.create()]
    is_skipped = threading.Event()
    bench.act = lambda stopping: is_skipped.wait(WAIT_SECONDS)
    ended = [bench.beside(run) for run in runs]
    for each in ended:
        each.add_done_callback(lambda _: is_skipped.set())
    for each in ended:
        each.result(WAIT_SECONDS)
    assert sorted(name_of(bench, run) for run in runs) == ["Completed", "Skipped"]
    assert len(bench.trained) == 1


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_that_prefect_shows_as_running_for_ever(bench: Bench, is_silent: bool) -> None:
    """Started by hand and killed: it is believed for as long as it may be alive."""
    killed, run = bench.create(), bench.create()
    forget(bench)
    last = datetime.now(timezone.utc) - (SILENCE if is_silent else timedelta(0))
    say(killed, **{MODEL_LABEL: bench.model, BEAT_LABEL: last.isoformat()})
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(killed, Running(), force=True)
    bench.execute(run)
    assert name_of(bench, run) == ("Completed" if is_silent else "Skipped")


@pytest.mark.long
def test_a_run_says_so_again_and_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that trains for longer than silence is borne is not taken for dead."""
    monkeypatch.setattr(trialflow.flows.retraining.model_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(trialflow.flows.retraining.model_lock, "SILENCE", timedelta(seconds=2))
    second = bench.create()

    def work(stopping: StopHandler) -> None:
        bench.act = lambda stopping: None
        assert not threading.Event().wait(2.5)  # longer than silence
        bench.beside(second).result(WAIT_SECONDS)

    bench.act = work
    bench.run()
    assert name_of(bench, second) == "Skipped"
