"""Flows of a user's that call `train`: which trials a retry continues, and how a stop reaches them.

With a stand-in for training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun, Pause
from prefect.flow_engine import run_flow
from prefect.states import Cancelling, Running, Suspended

from tests.flows.lifecycle.conftest import TIMEOUT_SECONDS, Stage, set_state, state_of
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle.parent_runs import ParentRuns
from trialflow.flows.train import train

pytestmark = pytest.mark.server


@pytest.fixture
def configs(stage: Stage) -> list[Any]:
    """Two experiments of one name, with other hyperparameters."""
    return [
        stage.config.model_copy(
            update={"hyperparameters": {**stage.config.hyperparameters, "n": n}}
        )
        for n in (1, 2)
    ]


class Trainings:
    """Stands in for training: notes who trains, and waits for a stop."""

    def __init__(self, stage: Stage, count: int, waits: bool = True) -> None:
        self.runs: list[UUID] = []
        self.requests: list[str] = []
        self.all_train = threading.Event()
        self.parent: Any = None
        self.outer: Any = None
        self._count, self._waits = count, waits
        stage.act = self

    def __call__(self, run: UUID, stopping: StopHandler) -> None:
        self.runs.append(run)
        if len(self.runs) == self._count:
            self.all_train.set()
        if self._waits:
            assert stopping.wait(TIMEOUT_SECONDS)
            self.requests.append(str(stopping.request))


@task
def train_one(config: Any) -> Any:
    return train(config)


@task
def train_another(config: Any) -> Any:
    return train(config)


LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("called", marks=LONG),
        "in tasks",
        pytest.param("in two tasks", marks=LONG),
        pytest.param("in a subflow", marks=LONG),
    ],
)
def test_a_retry_continues_the_trials(stage: Stage, configs: list[Any], how: str) -> None:
    """And not one of them under the other's hyperparameters, in whatever order they start."""
    attempts: list[list[str]] = []
    tasks = [train_one, train_another]

    @flow
    def inner(given: list[Any], attempt: int) -> list[Any]:
        return [train(config) for config in given]

    @flow(retries=1)
    def outer() -> list[str]:
        ordered = configs if not attempts else configs[::-1]
        if how == "called":
            results = [train(config) for config in ordered]
        elif how == "in tasks":
            results = [future.result() for future in [train_one.submit(each) for each in configs]]
        elif how == "in two tasks":  # of the same experiment
            by_task = {each: each(configs[0]) for each in tasks[:: -1 if attempts else 1]}
            results = [by_task[each] for each in tasks]
        else:
            results = inner(configs, len(attempts))  # in the same place, with other parameters
        again = train(configs[0])  # a further trial with the same hyperparameters
        trials = [result.trial for result in results]
        attempts.append([*(trials if ordered is configs or how != "called" else trials[::-1])])
        attempts[-1].append(again.trial)
        if len(attempts) == 1:
            raise RuntimeError("after its trainings")
        return attempts[-1]

    outer()
    assert attempts[0] == attempts[1]
    assert len({*attempts[0]}) == 3


@pytest.mark.long
def test_a_run_of_a_parent_has_its_own_trials(stage: Stage) -> None:
    """Another run of the parent begins new ones."""

    @flow
    def outer() -> str:
        return str(train(stage.config).trial)

    assert outer() != outer()


def stopped(stage: Stage, configs: list[Any], state: Any, in_tasks: bool) -> Trainings:
    """Set the state of a parent while it trains."""
    trainings = Trainings(stage, count=2 if in_tasks else 1)

    @flow
    def outer() -> list[str]:
        if in_tasks:
            futures = [train_one.submit(config) for config in configs]
            return [str(future.result().trial) for future in futures]
        return [train(configs[0]).trial]

    with get_client(sync_client=True) as client:
        parent = trainings.parent = client.create_flow_run(outer)

    def stop() -> None:
        assert trainings.all_train.wait(TIMEOUT_SECONDS)
        set_state(parent.id, state)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises((CancelledRun, Pause)):
        run_flow(outer, flow_run=parent)
    stopping.join()
    trainings.outer = outer
    return trainings


@pytest.mark.parametrize(
    "in_tasks", [pytest.param(False, marks=LONG), True], ids=["called", "in tasks"]
)
def test_a_cancel_of_a_parent_reaches_its_trainings(
    stage: Stage, configs: list[Any], in_tasks: bool
) -> None:
    """They save, and say who has asked."""
    trainings = stopped(stage, configs, Cancelling(), in_tasks)
    asked = f"cancelled (with its parent run {trainings.parent.name})"
    assert {*trainings.requests} == {asked}
    assert {state_of(run) for run in trainings.runs} == {"Cancelled"}


@LONG
@pytest.mark.parametrize("in_tasks", [False, True], ids=["called", "in tasks"])
def test_a_resumed_parent_continues_its_trainings(
    stage: Stage, configs: list[Any], in_tasks: bool
) -> None:
    """A Suspend reaches them, and they save."""
    trainings = stopped(stage, configs, Suspended(), in_tasks)
    assert all(each.startswith("suspended (") for each in trainings.requests)
    before = {stage.trial_of(run) for run in trainings.runs}
    stage.act = lambda run, stopping: None
    set_state(trainings.parent.id, Running())
    with get_client(sync_client=True) as client:
        again = client.read_flow_run(trainings.parent.id)
    assert {*run_flow(trainings.outer, flow_run=again)} == before


@pytest.mark.long
def test_another_attempt_at_a_parent_supersedes_its_trainings(
    stage: Stage, configs: list[Any]
) -> None:
    """They end at once and save nothing: the new attempt trains the same trials."""
    asked: list[Any] = []

    @flow
    def outer() -> None:
        train(configs[0])

    with get_client(sync_client=True) as client:
        parent = client.create_flow_run(outer)

        def act(run: UUID, stopping: StopHandler) -> None:
            call = client.read_flow_run(run).parent_task_run_id
            parents = ParentRuns(call)
            asked.append(parents.stop())
            client.set_flow_run_state(parent.id, Running(), force=True)
            asked.append(parents.stop())

        stage.act = act
        with contextlib.suppress(CancelledRun):  # if the training's own monitor looks in time
            run_flow(outer, flow_run=parent)
    first, second = asked
    assert first is None
    assert (second.flow_run_id, second.reason, second.is_superseded) == (
        parent.id, "cancelled", True
    )  # fmt: skip
    assert second.detail.startswith("another attempt at its parent run")


def test_a_signal_reaches_trainings_in_tasks(stage: Stage, configs: list[Any]) -> None:
    """Python tells the main thread alone."""
    trainings = Trainings(stage, count=2)

    @flow
    def outer() -> None:
        for future in [train_one.submit(config) for config in configs]:
            future.wait()

    def interrupt() -> None:
        assert trainings.all_train.wait(TIMEOUT_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        outer()
    interrupting.join()
    assert trainings.requests == ["interrupted (Ctrl-C)"] * 2
    assert {state_of(run) for run in trainings.runs} == {"Cancelled"}


def test_a_training_that_fails_leaves_the_others(stage: Stage, configs: list[Any]) -> None:
    """The other one ends, and its result is there."""
    failed = threading.Event()

    def act(run: UUID, stopping: StopHandler) -> None:
        with get_client(sync_client=True) as client:
            parameters = client.read_flow_run(run).parameters
        if parameters["config"]["hyperparameters"]["n"] == 1:
            failed.set()
            raise RuntimeError("lost")
        assert failed.wait(TIMEOUT_SECONDS)

    stage.act = act

    @flow
    def outer() -> tuple[Any, Any]:
        futures = [train_one.submit(config) for config in configs]
        return futures[0].result(raise_on_failure=False), futures[1].result()

    lost, result = outer()
    assert isinstance(lost, RuntimeError)
    assert result.batches_trained == 10
