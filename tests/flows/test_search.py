"""The flow `search`: on a real server, with real ranks."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.states import Running

import trialflow.flows.search
from tests.flows.lifecycle.conftest import set_state, state_of
from tests.support.flow import WarmForkServer
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY, lines
from tests.support.tensors import differing, stored_tensors
from tests.support.waiting import WAIT_SECONDS, stops_reach_ranks, until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import SearchError
from trial_core.processes.slots.fork_server import ForkServer, ServerProcess
from trial_core.search.log import Begun, Exited, Opened, RungReached, SearchLog, searches
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment
from trial_core.search.view import stored_view
from trialflow.deployments.cli.control import suspend
from trialflow.flows.search import SearchResult

pytestmark = [pytest.mark.slots, pytest.mark.server]

LR = {"type": "log", "minval": -3, "maxval": -1}


def experiment(here: Path, hyperparameters: dict[str, Any], **searcher: Any) -> SearchExperiment:
    """A search of toys, one at a time, on one rank each."""
    settings = {
        "name": "asha", "metric": "loss", "max_length": {"batches": 6}, "num_rungs": 2,
        "divisor": 2, "max_trials": 3, "max_concurrent_trials": 1,
    }  # fmt: skip
    return SearchExperiment.from_mapping(
        {
            "name": "toy", "entrypoint": "toy_trial:ToyTrial", "code": str(TOY),
            "hyperparameters": {"lr": LR, **hyperparameters},
            "resources": {"slots_per_trial": 1}, "searcher": settings | searcher,
            "checkpoint_storage": f"file://{here}/checkpoints", "max_restarts": 0,
            "tensorboard_logging": False,
        }
    )  # fmt: skip


def search(config: SearchExperiment, **more: Any) -> Any:
    """Run the flow, then send its remaining events to the server."""
    from trialflow.flows.search import search as flow
    from trialflow.flows.server.embedded_server import flush

    try:
        return flow(config, **more)
    finally:
        flush()


def log_of(here: Path, name: str) -> SearchLog:
    return SearchLog(CheckpointStore(f"file://{here}/checkpoints").storage, name)


def test_a_search_trains_the_better_trials_further(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each training is a flow run below the search's; a trial that waits has its checkpoint. The
    ranks of all trainings come from one process, which has imported PyTorch once."""
    made: list[ForkServer] = []
    used: set[ServerProcess] = set()

    class Counted(WarmForkServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def prepare(self, *arguments: Any) -> ServerProcess:
            used.add(process := super().prepare(*arguments))
            return process

    monkeypatch.setattr("trial_core.driver.placement.ForkServer", Counted)
    config = experiment(here, {}, max_trials=2)
    result = search(config)
    assert (len(made), len(used)) == (1, 1)
    assert isinstance(result, SearchResult)
    assert (result.is_over, result.stop_reason, result.trials) == (True, None, 2)
    log = log_of(here, result.search)
    reached = [event for event in log.events if isinstance(event, RungReached)]
    assert [event.batches for event in reached].count(3) == 2
    assert [event.batches for event in reached].count(6) >= 1
    store = CheckpointStore(f"file://{here}/checkpoints")
    for event in reached:
        manifest = store.open(str(event.checkpoint))
        assert manifest.progress.batches_trained == event.batches
        assert manifest.metrics["validation"]["loss"] == event.metric
    best = min(reached, key=lambda event: (event.metric, event.number))
    assert (result.metric, result.checkpoint_uuid) == (best.metric, best.checkpoint)
    runs = prefect_server.query(
        "flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [result.flow_run_id]}}}
    )
    trials = {event.id for event in log.events if isinstance(event, Begun)}
    assert {run["name"] for run in runs} == trials
    assert len(runs) == len(reached)
    assert {run["state_name"] for run in runs} == {"Completed"}
    state = Search(config, log_of(here, result.search), result.search).state
    assert state.is_over


@pytest.mark.long
def test_a_trial_that_fails_does_not_end_the_search(here: Path) -> None:
    """Each failure is recorded with its cause; too many end the search as failed."""
    breaks = {"do": "raise", "at_batch": 2, "once": str(here / "once"), "record": str(here)}
    result = search(experiment(here, breaks))
    failed = [e for e in log_of(here, result.search).events if isinstance(e, Exited)]
    assert [(each.trial, each.is_invalid) for each in failed] == [(0, False)]
    assert "the toy was told to break" in failed[0].why
    assert result.is_over
    always = {"do": "raise", "at_batch": 2, "record": str(here)}
    with pytest.raises(SearchError, match=r"2 trials .*max_failed_trials=1; .*told to break"):
        search(experiment(here, always, max_failed_trials=1))


@pytest.mark.long
def test_a_rank_that_is_killed_costs_its_trial_a_restart(here: Path) -> None:
    """As in any run: the trials reach what they reach without it, and none has failed."""

    def results(hyperparameters: dict[str, Any]) -> list[tuple[int, int, float | None]]:
        config = experiment(here, hyperparameters).model_copy(update={"max_restarts": 1})
        result = search(config)
        assert result.is_over
        events = log_of(here, result.search).events
        assert [event for event in events if isinstance(event, Exited)] == []
        return [(e.trial, e.length, e.metric) for e in events if isinstance(e, RungReached)]

    once = here / "once"
    killed = results({"do": "kill", "at_batch": 2, "once": str(once)})
    assert once.exists()
    assert killed == results({})


@pytest.mark.long
def test_a_search_that_is_cancelled_continues_where_it_was(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded stays; the trial that was being trained is trained to its rung."""
    paused, go = here / "paused", here / "go"
    reached = stops_reach_ranks(monkeypatch)
    waits = {"pause_at": 2, "paused": str(paused), "wait_for": str(go), "record": str(here)}
    config = experiment(here, waits)
    ended: list[Any] = []

    def run() -> None:
        try:
            with prefect_server.configured():
                ended.append(search(config))
        except BaseException as error:  # noqa: BLE001 - a stop is one
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(paused.exists, "a trial trains")
    (run_of_search,) = prefect_server.query(
        "flow_runs/filter",
        {"flows": {"name": {"any_": ["search"]}},
         "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}},
    )  # fmt: skip
    prefect_server.query(
        f"flow_runs/{run_of_search['id']}/set_state",
        {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True},
    )
    assert reached.acquire(timeout=WAIT_SECONDS / 5)
    go.touch()
    thread.join()
    name = run_of_search["name"]
    before = log_of(here, name)
    assert not Search(config, before, name).state.is_over
    count = len(before.events)
    result = search(config, search=name)
    assert (result.search, result.is_over, result.trials) == (name, True, 3)
    assert log_of(here, name).events[:count] == before.events[:count]


def deployed_run(server: PrefectServer, config: SearchExperiment) -> UUID:
    """A flow run of a deployment of the flow, which no worker takes."""
    deployment = server.query(
        "deployments/",
        {"name": "here", "flow_id": server.query("flows/", {"name": "search"})["id"]},
    )
    run = server.query(
        f"deployments/{deployment['id']}/create_flow_run",
        {
            "parameters": {"config": config.model_dump(mode="json")},
            "state": {"type": "PENDING"},
        },
    )
    return UUID(run["id"])


def execute(run: UUID) -> Any:
    """Run the flow in this process, as a worker's process does."""
    from trialflow.flows.search import search as flow

    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(run)
    return run_flow(flow, flow_run=flow_run)


@pytest.mark.long
@pytest.mark.parametrize("how", ["--resume", "Resume"])
def test_a_search_that_is_suspended_continues_where_it_was(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All trials that train save; another run, or the run itself, trains no batch twice."""
    go, reached = here / "go", stops_reach_ranks(monkeypatch)
    monkeypatch.setattr(trialflow.flows.search, "side_by_side", lambda experiment: 2)
    waits = {"pause_at": 1, "paused": str(here / "paused"), "wait_for": str(go)}
    config = experiment(here, {**waits, "record": str(here)}, max_concurrent_trials=3)
    run = deployed_run(prefect_server, config)
    store = CheckpointStore(f"file://{here}/checkpoints")
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            with prefect_server.configured():
                until(
                    lambda: len(lines(here, "samples", 0)) == 2, "two trials have trained a batch"
                )
                suspend(searches(store.storage)[0])
                for _ in range(2):
                    assert reached.acquire(timeout=WAIT_SECONDS / 5)
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            errors.append(error)
        go.touch()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(Pause):
        execute(run)
    stopping.join()
    assert errors == []
    (name,) = searches(store.storage)
    before = log_of(here, name).events
    assert [type(event) for event in before] == [Opened, Begun, Begun]
    trials = [event.id for event in before if isinstance(event, Begun)]
    saved = [store.newest(trial) for trial in trials]
    assert [each and each.progress.batches_trained for each in saved] == [2, 2]
    assert not stored_view(store.storage, name).state.is_over
    assert state_of(run) == "Suspended"
    children = prefect_server.query(
        "flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [str(run)]}}}
    )
    assert [child["state_name"] for child in children] == ["Cancelled", "Cancelled"]
    if how == "Resume":
        set_state(run, Running())
        result = execute(run)
    else:
        result = search(config, search=name)
    assert (result.search, result.is_over, result.trials) == (name, True, 3)
    events = log_of(here, name).events
    assert events[: len(before)] == before
    assert [event for event in events if isinstance(event, Exited)] == []
    trained = Counter(batch for batch, *_ in lines(here, "samples", 0))
    ends = [trial.batches for trial in stored_view(store.storage, name).state.trials]
    assert trained == Counter(batch for end in ends for batch in range(end))


@pytest.mark.long
def test_trials_side_by_side_are_those_one_after_the_other(
    here: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: list[ServerProcess]
) -> None:
    """Each has the ranks of its process, and of as many processes as trials train at a time."""
    found = []
    for at_a_time in (1, 2):
        monkeypatch.setattr(trialflow.flows.search, "side_by_side", lambda _, most=at_a_time: most)
        samples = {"type": "int", "minval": 12, "maxval": 40}
        config = experiment(
            here, {"train_samples": samples, "shuffle": True}, name="random", max_trials=4,
            max_concurrent_trials=4,
        )  # fmt: skip
        result = search(config.model_copy(update={"name": f"toy-{at_a_time}"}))
        assert result.is_over
        events = log_of(here, result.search).events
        saved = {e.trial: e.checkpoint for e in events if isinstance(e, RungReached)}
        folder = here / f"{at_a_time}"
        found.append({k: stored_tensors(config, v, folder / str(k)) for k, v in saved.items()})
    assert [*sorted(found[0])] == [*sorted(found[1])] == [0, 1, 2, 3]
    assert all(found[0].values())
    assert [differing(found[0][trial], found[1][trial]) for trial in range(4)] == [[]] * 4
    assert differing(found[0][0], found[0][1])  # their hyperparameters are others
    assert len(fork_servers) == 3


@pytest.mark.parametrize(
    ("slots", "cores", "devices", "is_counted", "wanted", "expected"),
    [
        (1, 8, 0, False, 4, 4),
        (1, 8, 0, False, 16, 8),
        (2, 8, 0, False, 16, 4),
        (4, 2, 0, False, 16, 1),
        (2, 8, 8, False, 16, 1),
        (2, 8, 8, True, 16, 4),
    ],
)
def test_how_many_train_side_by_side(
    here: Path, monkeypatch: pytest.MonkeyPatch, slots: int, cores: int, devices: int,
    is_counted: bool, wanted: int, expected: int,
) -> None:  # fmt: skip
    """As many as have slots; on GPUs one, unless the server counts them."""
    module = trialflow.flows.search
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(module, "count_accelerators", lambda variables: devices)
    monkeypatch.setattr(module, "resolve_slot_count", lambda *_: slots)
    monkeypatch.setattr(module, "has_gpu_limit", lambda slots: is_counted)
    config = experiment(here, {}, max_concurrent_trials=wanted)
    assert module.side_by_side(config) == expected
