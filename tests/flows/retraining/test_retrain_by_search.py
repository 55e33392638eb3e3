"""The flow `retrain` whose challenger is the best trial of a search."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.retrain
import trialflow.flows.train
from tests.support.manifests import commit_files
from tests.support.prefect import PrefectServer
from tests.support.retraining import RetrainHarness
from tests.support.slots import TOY
from tests.support.waiting import WAIT_SECONDS, ask, stops_reach_ranks, until
from trial_core.config import ExperimentConfig
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Given
from trial_core.errors import ConfigError, TrialflowError
from trial_core.processes.machine.run_dirs import trial_id
from trial_core.schedule.sequencer import Progress
from trial_core.search.log import Begun, RungReached, SearchLog
from trial_core.search.settings import SearchExperiment
from trialflow.flows.search import SearchResult

pytestmark = pytest.mark.server

RANGES = {"micro_batch_size": {"type": "categorical", "vals": [1, 3]}}


class SearchHarness(RetrainHarness):
    """A model whose retraining searches: two trials of three batches, one after the other."""

    def __init__(self, server: PrefectServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.hyperparameters: dict[str, Any] = {}

    def config(self, **retraining: Any) -> ExperimentConfig:
        return SearchExperiment.from_mapping(
            {
                "name": self.model, "entrypoint": "toy_trial:ToyTrial", "code": str(TOY),
                "hyperparameters": {**RANGES, **self.hyperparameters},
                "resources": {"slots_per_trial": 1},
                "searcher": {
                    "name": "grid", "metric": "loss", "max_length": {"batches": 3},
                    "max_trials": 2, "max_concurrent_trials": 1,
                },
                "max_restarts": 0, "tensorboard_logging": False,
                "retraining": {"model": self.model, "search": True, **retraining},
                **self.experiment,
            }
        )  # fmt: skip

    def train_trial(self, config: ExperimentConfig, trial: str, given: Given) -> TrialResult:
        """In place of training: of the two trials, the second is the better one."""
        length = config.searcher.max_length.value
        metrics = {"loss": 1 / config.hyperparameters["micro_batch_size"]}
        saved = commit_files(
            self.store, length, trial=trial, experiment=self.model,
            hyperparameters=config.hyperparameters, metrics={"validation": metrics},
            progress=Progress(length, validated_at=length),
        )  # fmt: skip
        return TrialResult(
            trial, length, stopped_early=False, checkpoint_uuid=saved.uuid, checkpoint_at=length,
            validation_metrics=metrics, validated_at=length,
        )  # fmt: skip

    def search_of(self, run: Any) -> str:
        """The id of a run's search."""
        return trial_id(self.model, str(run))

    def log(self, run: Any) -> SearchLog:
        return SearchLog(self.store.storage, self.search_of(run))

    def trials_begun(self, run: Any) -> list[str]:
        return [event.id for event in self.log(run).events if isinstance(event, Begun)]


@pytest.fixture
def searching(prefect_server: PrefectServer, here: Path) -> SearchHarness:
    """A model without versions."""
    return SearchHarness(prefect_server, here)


@pytest.mark.parametrize(
    "has_ranks",
    [False, pytest.param(True, marks=[pytest.mark.slots, pytest.mark.long])],
    ids=["stand-in", "ranks"],
)
def test_the_best_trial_of_a_search_is_promoted(
    searching: SearchHarness, monkeypatch: pytest.MonkeyPatch, has_ranks: bool
) -> None:
    """Its checkpoint is the version, and the report has the search and the hyperparameters."""
    if not has_ranks:
        monkeypatch.setattr(trialflow.flows.train, "train_trial", searching.train_trial)
    result = searching.run()
    assert (result.promoted, result.champion, result.challenger) == (True, None, 1)
    run = result.flow_run_id
    reached = [event for event in searching.log(run).events if isinstance(event, RungReached)]
    best = min(reached, key=lambda event: event.metric or 0.0)
    begun = searching.trials_begun(run)
    version = searching.registry.version(searching.model, 1)
    assert len(begun) == len(reached) == 2
    assert best.trial == 1  # else the first one might always be taken
    assert version.trial == result.trial == begun[best.trial]
    assert version.checkpoint == result.checkpoint_uuid == best.checkpoint
    assert result.challenger_value == best.metric
    report = searching.report(run)
    assert f"Search `{searching.search_of(run)}` has begun 2 trials." in report
    manifest = searching.store.open(version.checkpoint)
    assert f'"micro_batch_size": {manifest.hyperparameters["micro_batch_size"]}' in report
    assert f"| challenger | 1 | `{version.checkpoint}` | `{version.trial}` | 3 |" in report


@pytest.mark.slots
@pytest.mark.long
def test_trials_start_from_the_champion(searching: SearchHarness) -> None:
    """The champion is validated with its own hyperparameters, and every trial begins with its
    weights."""
    first = searching.run()
    second = searching.run(start="warm")
    assert (second.champion, second.champion_value) == (1, first.challenger_value)
    for trial in searching.trials_begun(second.flow_run_id):
        manifest = searching.store.newest(trial)
        assert manifest is not None
        source = manifest.config["searcher"]
        assert source["source_checkpoint_uuid"] == first.checkpoint_uuid
        assert source["source_weights_only"] is True


@pytest.mark.slots
@pytest.mark.long
def test_a_stopped_run_continues_its_search(
    searching: SearchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of a run that was cancelled begins no trial again, and promotes once."""
    reached = stops_reach_ranks(monkeypatch)
    paused, go = searching.folder / "paused", searching.folder / "go"
    searching.hyperparameters = {
        "pause_at": 2, "paused": str(paused), "wait_for": str(go), "record": str(searching.folder)
    }  # fmt: skip
    run = searching.create_run()
    ended: list[BaseException | Any] = []

    def work() -> None:
        try:
            with searching.server.configured():
                ended.append(searching.execute(run))
        except BaseException as error:  # noqa: BLE001 - a stop is one
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(paused.exists, "a trial trains", WAIT_SECONDS)
    state = {"type": "CANCELLING", "name": "Cancelling"}
    ask(searching.server, f"flow_runs/{run}/set_state", {"state": state, "force": True})
    assert reached.acquire(timeout=WAIT_SECONDS / 5)
    go.touch()
    thread.join()
    before = searching.log(run).events
    assert len(searching.trials_begun(run)) == 1
    assert (searching.champion(), searching.state_of(run)[0]) == (None, "Cancelled")
    assert "**stopped: cancelled" in searching.report(run)
    result = searching.execute(run)
    assert (result.promoted, searching.champion(), len(searching.moves())) == (True, 1, 1)
    assert searching.log(run).events[: len(before)] == before
    assert len(set(searching.trials_begun(run))) == len(searching.trials_begun(run)) == 2


@pytest.fixture
def faked(searching: SearchHarness, monkeypatch: pytest.MonkeyPatch) -> SearchHarness:
    """The model has a champion, and its ranks are replaced."""
    searching.replace_ranks(monkeypatch)
    searching.promote_by_hand()
    return searching


def replace_search(monkeypatch: pytest.MonkeyPatch, run: Callable[[str], SearchResult]) -> None:
    """Have a function in place of the search; it gets the search's id."""

    def search_run(config: Any, search: str, *rest: Any) -> Any:
        return types.SimpleNamespace(run=lambda is_new, take_over: run(search))

    monkeypatch.setattr(trialflow.flows.retrain, "SearchRun", search_run)


def test_a_search_without_a_result(faked: SearchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The champion stays, and the outcome says why."""
    replace_search(monkeypatch, lambda search: SearchResult(search, is_over=True, trials=2))
    result = faked.run()
    assert (result.promoted, result.challenger, faked.champion()) == (False, None, 1)
    assert result.trial == faked.search_of(result.flow_run_id)
    assert result.why == f"no trial of search {result.trial} has a finite metric"


def test_a_search_with_a_stopped_trial(
    faked: SearchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails, so that a retry continues it: nothing is decided about half a search."""
    replace_search(monkeypatch, lambda search: SearchResult(search, False, "trial 1 was suspended"))
    run = faked.create_run()
    with pytest.raises(TrialflowError, match="is not over: trial 1 was suspended; retry this run"):
        faked.execute(run)
    replace_search(monkeypatch, lambda search: SearchResult(search, is_over=True, trials=2))
    assert faked.execute(run).promoted is False


def test_trials_get_the_gpus_of_the_run(
    faked: SearchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run holds GPUs while it validates the champion, and none while it searches: each trial
    waits for its own."""
    held, seen = [], []

    @contextmanager
    def gpu_slots(config: Any) -> Iterator[dict[str, str]]:
        held.append("gpu")
        yield {}
        held.clear()

    def evaluate(*given: Any) -> Any:
        seen.append(("validation", len(held)))
        return faked._evaluate(*given)

    def search(name: str) -> SearchResult:
        seen.append(("search", len(held)))
        return SearchResult(name, is_over=True, trials=2)

    monkeypatch.setattr(trialflow.flows.retrain, "gpu_slots", gpu_slots)
    monkeypatch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", evaluate)
    replace_search(monkeypatch, search)
    faked.run()
    assert seen == [("validation", 1), ("search", 0)]


def test_credentials_stay_out_of_the_trials_runs(
    faked: SearchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's flow run has the experiment as a parameter, which names the block of its storage,
    and does not have what the block holds."""
    given: list[ExperimentConfig] = []

    def opened(config: ExperimentConfig) -> ExperimentConfig:
        place = config.checkpoint_storage
        secret = place.model_copy(update={"options": {"auto_mkdir": True}})
        return config.model_copy(update={"checkpoint_storage": secret})

    def search_run(config: ExperimentConfig, search: str, *rest: Any) -> Any:
        given.append(config)
        result = SearchResult(search, is_over=True)
        return types.SimpleNamespace(run=lambda is_new, take_over: result)

    monkeypatch.setattr(trialflow.flows.retrain, "with_credentials", opened)
    monkeypatch.setattr(trialflow.flows.retrain, "SearchRun", search_run)
    faked.run()
    assert [config.checkpoint_storage.options for config in given] == [{}]


def test_a_search_that_is_not_asked_for_is_refused(faked: SearchHarness) -> None:
    """Nothing is planned; the error names both ways."""
    run = faked.create_run(search=False)
    with pytest.raises(ConfigError, match=r"retraining.search: true; .* `trialflow search`"):
        faked.execute(run)
    assert faked.validated == []
