"""What a search makes of its trials' trainings: on a real server, with a stand-in for training."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import runtime
from prefect.states import Cancelling, Suspended

import trialflow.flows.lifecycle.stop_monitor
import trialflow.flows.search
import trialflow.flows.train
from tests.flows.lifecycle.conftest import set_state
from tests.support.manifests import commit_files
from tests.support.slots import TOY
from tests.support.wire import Wire
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.result import TrialResult, describe_pause
from trial_core.driver.run import Given
from trial_core.errors import (
    CheckpointNotFound,
    CommitConflict,
    ConfigError,
    LaunchError,
    NonFiniteLoss,
    Stopped,
    StorageError,
    TrialError,
    TrialflowError,
)
from trial_core.observe.events.observers import Observer, observing
from trial_core.processes.machine.run_dirs import locked_run_dir
from trial_core.schedule.stop_requests import StopHandler
from trial_core.search.log import Exited, RungReached, SearchLog, searches
from trial_core.search.settings import SearchExperiment
from trialflow.flows.lifecycle.parent_runs import stop_handler_of_caller
from trialflow.flows.lifecycle.stop_monitor import StopMonitor
from trialflow.flows.search import SearchResult, SearchRun
from trialflow.flows.server.embedded_server import flush

pytestmark = pytest.mark.server

LIMIT_SECONDS = 60.0


class Trainings:
    """Every trial reaches its rung, with its number as its loss, unless `act` has another result.

    Attributes:
        act: gets the trial's number, its run's stop handler, and the result that it would have.
        count: how many have begun.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.act: Callable[[int, StopHandler, TrialResult], TrialResult | None] = (
            lambda number, stopping, result: None
        )

    def train_trial(self, config: Any, trial: str, given: Given) -> TrialResult:
        """The stand-in for `trialflow.flows.train.train_trial`."""
        self.count += 1
        search, _, number = given.attempt.rpartition("/")
        assert given.task == f"search {search}", "`trialflow cancel` reads it"
        length = (given.pause_at or config.searcher.max_length).value
        result = TrialResult(
            trial, length, given.pause_at is not None, describe_pause(given.pause_at),
            validation_metrics={"loss": int(number)}, validated_at=length,
        )  # fmt: skip
        return self.act(int(number), given.stopping, result) or result

    def config(self, **searcher: Any) -> SearchExperiment:
        """A search of three trials, two of which are due at a time: rungs at 3 and 6 batches."""
        settings = {
            "name": "asha", "metric": "loss", "max_length": {"batches": 6}, "num_rungs": 2,
            "divisor": 2, "max_trials": 3, "max_concurrent_trials": 2,
        }  # fmt: skip
        return SearchExperiment.from_mapping(
            {
                "name": "toy", "entrypoint": "toy_trial:ToyTrial", "code": str(TOY),
                "hyperparameters": {"lr": {"type": "log", "minval": -3, "maxval": -1}},
                "resources": {"slots_per_trial": 1, "preload": False},
                "searcher": settings | searcher, "stopping": {"grace_seconds": 0},
                "checkpoint_storage": f"file://{self.folder}/checkpoints",
            }
        )  # fmt: skip

    def search(self, search: str | None = None, **searcher: Any) -> SearchResult:
        """Run the flow, then send its remaining events to the server."""
        try:
            result = trialflow.flows.search.search(self.config(**searcher), search)
        finally:
            flush()
        assert isinstance(result, SearchResult)
        return result

    @property
    def log(self) -> SearchLog:
        """The log of the only search."""
        storage = CheckpointStore(f"file://{self.folder}/checkpoints").storage
        (name,) = searches(storage)
        return SearchLog(storage, name)

    def exits(self) -> list[tuple[int, str]]:
        return [(e.trial, e.why) for e in self.log.events if isinstance(e, Exited)]

    def reached(self) -> list[tuple[int, int]]:
        return [(e.trial, e.length) for e in self.log.events if isinstance(e, RungReached)]


@pytest.fixture
def trainings(here: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    found = Trainings(here)
    monkeypatch.setattr(trialflow.flows.train, "train_trial", found.train_trial)
    for module in (
        trialflow.flows.lifecycle.stop_monitor, trialflow.flows.search, trialflow.flows.train
    ):  # fmt: skip
        monkeypatch.setattr(module, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(trialflow.flows.search, "side_by_side", lambda experiment: 1)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        StorageError("it is away"),
        pytest.param(ConfigError("no such tracker"), marks=pytest.mark.long),
        LaunchError("no cluster answers"),
    ],
)
def test_an_error_that_is_not_the_trials_ends_the_search(
    trainings: Trainings, error: TrialflowError
) -> None:
    """What runs is trained to its rung and recorded, no failure is, and the search continues."""
    shown = threading.Semaphore(0)
    show = SearchRun._show

    def show_and_tell(self: SearchRun, search: Any) -> None:
        show(self, search)
        shown.release()

    def act(number: int, stopping: StopHandler, result: TrialResult) -> None:
        if number == 0:
            raise error
        for _ in range(2):  # at first, and after the error
            assert shown.acquire(timeout=LIMIT_SECONDS)
        shown.release(2)
        if number == 1:
            raise TrialError("the storage may have been the cause of this, too")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchRun, "_show", show_and_tell)
        patch.setattr(trialflow.flows.search, "side_by_side", lambda experiment: 3)
        trainings.act = act
        with pytest.raises(type(error), match=str(error)):
            trainings.search(max_concurrent_trials=3)
    assert trainings.exits() == []
    assert trainings.reached() == [(2, 3)]
    trainings.act = lambda *_: None
    result = trainings.search(trainings.log.events[0].search, max_concurrent_trials=3)
    assert (result.is_over, result.trials) == (True, 3)


def test_a_trial_that_diverges_is_no_failure_of_the_search(trainings: Trainings) -> None:
    """It is the worst of its rung; so is one that ends itself. The page says what the search has
    at each time."""
    shown: list[tuple[int, bool]] = []

    class Noting(Observer):
        def search_shown(self, lines: Any, rungs: Any, progress: float) -> None:
            begun = int(lines[0].split()[0])
            shown.append((begun, progress == 1))

    def act(number: int, stopping: StopHandler, result: TrialResult) -> TrialResult | None:
        if number == 0:
            raise NonFiniteLoss("the loss is not finite since batch 2")
        return replace(result, stop_reason=None, validated_at=None) if number == 1 else None

    trainings.act = act
    with observing(Noting()):
        result = trainings.search(max_failed_trials=0)
    assert (result.is_over, result.trials) == (True, 3)
    exits = [event for event in trainings.log.events if isinstance(event, Exited)]
    assert [(each.trial, each.is_counted) for each in exits] == [(0, False), (1, False)]
    assert (shown[0], shown[-1]) == ((1, False), (3, True))


def test_a_server_that_is_away_ends_the_search(
    trainings: Trainings, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has, and an error that says so."""
    note, await_server = SearchRun._note, StopMonitor.await_server

    def note_and_cut(self: SearchRun, *arguments: Any) -> None:
        note(self, *arguments)
        if trainings.count == 1:
            wire.cut()

    def mend_and_await(self: StopMonitor) -> None:
        if not wire.is_whole:  # of the search: a training that has begun ends before
            wire.mend()
        await_server(self)

    monkeypatch.setattr(SearchRun, "_note", note_and_cut)
    monkeypatch.setattr(StopMonitor, "await_server", mend_and_await)
    with pytest.raises(TrialflowError, match=r"trial . .*cannot be trained: .*Connect.* server"):
        trainings.search()
    assert (trainings.exits(), trainings.reached()) == ([], [(0, 3)])


@pytest.mark.long
def test_a_trial_that_another_process_trains_is_left_to_it(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time in which a run that was superseded ends; the others are trained."""

    def busy(number: int, stopping: StopHandler, result: TrialResult) -> None:
        if number == 1 and trainings.count < 4:
            with locked_run_dir(result.trial), locked_run_dir(result.trial, 0.01):
                pass

    trainings.act = busy
    result = trainings.search()
    assert not result.is_over
    assert "trial 1 was not trained further: trial toy-" in str(result.stop_reason)
    assert "is being trained by process" in str(result.stop_reason)
    assert (trainings.exits(), {trial for trial, _ in trainings.reached()}) == ([], {0, 2})
    config = trainings.config().of_trial({"lr": 0.1}, "toy-search")
    wait = trialflow.flows.train.takeover_wait_seconds
    assert wait(config) == 0
    assert wait(config, is_part=True) > 0
    trainings.act = lambda *_: None
    assert trainings.search(result.search).is_over


def test_a_trial_is_not_continued_as_a_search(trainings: Trainings) -> None:
    """Its id is refused before anything is written."""
    store = CheckpointStore(f"file://{trainings.folder}/checkpoints")
    store.take_over("toy-0123456789ab", "an attempt")
    stored = trainings.folder / "checkpoints"
    before = sorted(stored.rglob("*"))
    with pytest.raises(CheckpointNotFound, match="has no search with this id, which may be that"):
        trainings.search("toy-0123456789ab")
    assert sorted(stored.rglob("*")) == before


class Told(Observer):
    """Keeps what a person has to know."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.mark.long
@pytest.mark.parametrize("newest", [2, 3])
def test_a_trial_whose_checkpoint_was_deleted_is_trained_again_with_a_warning(
    trainings: Trainings, newest: int
) -> None:
    """It names the batches; a trial that continues from its rung has none."""
    store = CheckpointStore(f"file://{trainings.folder}/checkpoints")

    def act(number: int, stopping: StopHandler, result: TrialResult) -> TrialResult:
        if result.batches_trained == 3:
            commit_files(store, newest, trial=result.trial)
        return replace(
            result, checkpoint_uuid="that of its rung", checkpoint_at=result.validated_at
        )

    trainings.act = act
    with observing(told := Told()):
        trainings.search(max_trials=2)
    assert (0, 6) in trainings.reached()
    again = [re.sub(r" \(.*\) ", " ", text).partition(", and")[0] for text in told.notices]
    assert again == ["trial 0 is trained again from batch 2: it had reached batch 3"][newest - 2 :]


def test_a_limit_of_trials_side_by_side_is_told(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, if more are due at a time."""
    monkeypatch.setattr(trialflow.flows.search, "MAX_SIDE_BY_SIDE", 1)
    with observing(told := Told()):
        trainings.search(num_rungs=1, max_trials=2)
    assert told.notices == ["2 trials may be due at a time; at most 1 train side by side"]


def stop_of(number: int, state: Any) -> Callable[[int, StopHandler, TrialResult], None]:
    """Have the first training of a trial wait for a stop of its flow run alone."""
    has_stopped = threading.Event()

    def act(trial: int, stopping: StopHandler, result: TrialResult) -> None:
        if trial == number and not has_stopped.is_set():
            has_stopped.set()
            set_state(UUID(str(runtime.flow_run.id)), state)
            assert stopping.wait(LIMIT_SECONDS)

    return act


def test_a_trial_whose_flow_run_is_cancelled_is_out(trainings: Trainings) -> None:
    """A person has ended it; the search continues without it."""
    trainings.act = stop_of(0, Cancelling())
    result = trainings.search(num_rungs=1, max_trials=2)
    assert (result.is_over, result.stop_reason) == (True, None)
    assert trainings.exits() == [(0, "its flow run was cancelled")]


@pytest.mark.long
@pytest.mark.parametrize("how", ["suspended", "superseded"])
def test_a_training_that_is_stopped_otherwise_continues_later(
    trainings: Trainings, how: str
) -> None:
    """Nothing is recorded; the others are trained, and the result says which one is not."""
    trainings.act = stop_of(0, Suspended())
    if how == "superseded":
        trainings.act = lambda number, *_: superseded() if number == 0 else None
    result = trainings.search()
    assert not result.is_over
    assert str(result.stop_reason).startswith("trial 0 was not trained further: ")
    assert how in str(result.stop_reason)
    assert (trainings.exits(), {trial for trial, _ in trainings.reached()}) == ([], {1, 2})
    trainings.act = lambda *_: None
    assert trainings.search(result.search).is_over
    assert {trial for trial, _ in trainings.reached()} == {0, 1, 2}


def test_a_stop_that_the_search_alone_has_seen_reaches_its_trials(trainings: Trainings) -> None:
    """As the end of its time, or a signal before the trial's run listens to signals."""

    def act(number: int, stopping: StopHandler, result: TrialResult) -> None:
        caller = stop_handler_of_caller()
        assert caller is not None
        caller.ask("time budget", "5 s are over")
        assert stopping.wait(LIMIT_SECONDS)
        raise Stopped("nothing to save: training had not begun")

    trainings.act = act
    result = trainings.search()
    assert (result.is_over, result.stop_reason) == (False, "time budget (5 s are over)")
    assert (trainings.exits(), trainings.reached()) == ([], [])


def superseded() -> None:
    raise CommitConflict("it was superseded at the same time")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(
            {"validated_at": 2, "batches_trained": 2, "stop_reason": None, "stopped_early": False},
            r"by itself, after 2 batches \(validated at 2\), before its validation at 3 batches",
            id="script",
        ),
        pytest.param(
            {"validated_at": 2, "stop_reason": None, "trial_stop_reason": "enough"},
            r"has completed early: enough, after 3 batches \(validated at 2\), before .* at 3",
            id="stop",
        ),
        pytest.param(
            {"validated_at": None}, r"by itself, after 3 batches \(no validation\)",
            id="unvalidated",
        ),
    ],
)  # fmt: skip
def test_a_trial_that_ends_before_its_validation_at_the_rung_has_failed(
    trainings: Trainings, change: dict[str, Any], why: str
) -> None:
    """The metric of an earlier validation does not count."""
    trainings.act = lambda number, _, result: replace(result, **change) if number == 0 else None
    result = trainings.search()
    assert result.is_over
    ((trial, seen),) = trainings.exits()
    assert trial == 0
    assert re.search(why, seen), seen
