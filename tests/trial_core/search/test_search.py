"""A search and its log: continued after every record, by one driver, with greater maxima."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, ExperimentWarning, IgnoredFieldWarning
from trial_core.errors import ConfigError, SearchError, StorageError, Superseded
from trial_core.search.log import Begun, RungReached, SearchEvent, SearchLog
from trial_core.search.plan import BracketPlan
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment
from trial_core.search.simulate import read_curves, simulate
from trial_core.search.state import described, in_unit
from trial_core.search.view import stored_view

SEARCH = "toy-search-0000beef"
RANGES = {
    "lr": {"type": "log", "minval": -4, "maxval": -1, "count": 3},
    "layers": {"type": "int", "minval": 1, "maxval": 4, "count": 2},
    "optimizer": {"type": "categorical", "vals": ["adam", {"momentum": {
        "type": "double", "minval": 0.5, "maxval": 0.9, "count": 2}}]},
    "width": 8,
}  # fmt: skip


def experiment(**searcher: Any) -> SearchExperiment:
    settings = {
        "name": "asha", "metric": "loss", "max_length": {"batches": 64}, "max_trials": 9,
        "num_rungs": 3, "divisor": 2, "max_concurrent_trials": 3,
    }  # fmt: skip
    return SearchExperiment.from_mapping(
        {
            "name": "toy", "entrypoint": "m:Trial", "hyperparameters": RANGES,
            "searcher": settings | searcher,
        }
    )  # fmt: skip


@pytest.fixture
def storage(tmp_path: Path) -> Any:
    return CheckpointStore(f"file://{tmp_path}/checkpoints").storage


def loss(trial: int, length: int) -> float:
    """Better with every batch; the order of trials changes on the way."""
    return math.sin(trial * 7 + length / 20) + 10 / length


def train(search: Search, most: int = 10**6) -> None:
    """Train a trial at a time, at most so many."""
    for _ in range(most):
        if (leg := search.next(())) is None:
            return
        length = int(leg.until.value)  # type: ignore[arg-type]
        search.reached(leg, length, {"loss": loss(leg.trial.number, length)}, f"at-{length}")


def what(events: list[SearchEvent]) -> list[tuple[Any, ...]]:
    """Records without their times."""
    return [
        (event.trial, event.hyperparameters) if isinstance(event, Begun)
        else (event.trial, event.length, event.metric) if isinstance(event, RungReached)
        else (type(event).__name__,)
        for event in events
    ]  # fmt: skip


def test_a_driver_that_ends_after_any_record_is_continued(storage: Any, tmp_path: Path) -> None:
    """By another one, to the same end, record by record."""
    log = SearchLog(storage, SEARCH)
    search = Search(experiment(), log, SEARCH)
    train(search)
    assert search.state.is_over
    assert search.state.progress == 1.0
    whole = what(log.events)
    assert max(len(trial.reached) for trial in search.state.trials) == 3
    for count in range(1, len(whole) + 1):
        other = CheckpointStore(f"file://{tmp_path}/{count}").storage
        begun = SearchLog(other, SEARCH)
        for event in log.events[:count]:
            fields = {
                name: getattr(event, name)
                for name in event.__struct_fields__
                if name not in ("number", "search", "at", "by")
            }
            begun.append(type(event), **fields)
        continued = SearchLog(other, SEARCH)
        train(Search(experiment(), continued, SEARCH))
        assert what(continued.events) == whole


def test_of_two_drivers_one_ends(storage: Any) -> None:
    """As soon as it writes a record that the other has written."""
    first = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    second = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    train(first, 2)
    with pytest.raises(Superseded, match="is continued by another run"):
        train(second)
    train(first)
    assert first.state.is_over


def answers_lost(
    storage: Any, monkeypatch: pytest.MonkeyPatch, lost: int, is_written: bool
) -> None:
    """The storage fails at the so-many-th record, which it has written or not."""
    create, calls = storage.create, itertools.count(1)

    def fail(key: str, data: bytes) -> None:
        if (is_lost := next(calls) == lost) and not is_written:
            raise StorageError("no answer")
        create(key, data)
        if is_lost:
            raise StorageError("no answer")

    monkeypatch.setattr(storage, "create", fail)


@pytest.mark.parametrize("is_told_again", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_record_whose_answer_was_lost_is_there_once(
    storage: Any, monkeypatch: pytest.MonkeyPatch, is_written: bool, is_told_again: bool
) -> None:
    """Whichever it was, stored or not: the driver continues, and the end is the same search."""
    log = SearchLog(storage, SEARCH)
    train(Search(experiment(), log, SEARCH))
    for lost in range(2, len(log.events) + 1):
        other = f"toy-search-{lost:08x}"
        with monkeypatch.context() as patch:
            answers_lost(storage, patch, lost, is_written)
            search = Search(experiment(), SearchLog(storage, other), other)
            with pytest.raises(StorageError, match="no answer"):
                train(search)
            due = search.state.work[0]
            if is_told_again and log.events[lost - 1].__class__ is RungReached:
                leg = search._leg(search.state.trials[due.trial])  # type: ignore[union-attr]
                length = int(leg.until.value)  # type: ignore[arg-type]
                value = loss(leg.trial.number, length)
                search.reached(leg, length, {"loss": value}, f"at-{length}")
            train(search)
        assert what(search.events) == what(log.events)
        assert SearchLog(storage, other).events == search.events


def test_a_result_after_a_lost_answer(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another trial: both are recorded, in order."""
    search = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    legs = [search.next(()), search.next({0})]
    answers_lost(storage, monkeypatch, 1, is_written=True)
    first, second = (leg for leg in legs if leg is not None)
    with pytest.raises(StorageError):
        search.reached(first, 16, {"loss": 1.0}, None)
    search.reached(second, 16, {"loss": 2.0}, None)
    assert what(SearchLog(storage, SEARCH).events)[-2:] == [(0, 16, 1.0), (1, 16, 2.0)]
    assert [len(trial.reached) for trial in search.state.trials] == [1, 1]


def test_another_driver_after_a_lost_answer(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the same number that another driver has written is not taken for one's own."""
    search = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    leg = search.next(())
    assert leg is not None
    with monkeypatch.context() as patch:
        answers_lost(storage, patch, 1, is_written=False)
        with pytest.raises(StorageError):
            search.reached(leg, 16, {"loss": 1.0}, None)
    train(other := Search(experiment(), SearchLog(storage, SEARCH), SEARCH), 1)
    for _ in range(2):
        with pytest.raises(Superseded, match="has written record 3"):
            search.next(())
        with pytest.raises(Superseded, match="has written record 3"):
            search.reached(leg, 16, {"loss": 1.0}, None)
    assert SearchLog(storage, SEARCH).events == other.events


def test_more_trials_and_a_longer_training_continue_it(storage: Any) -> None:
    """Nothing that was decided changes; the new trials and rungs come on top."""
    train(Search(experiment(), SearchLog(storage, SEARCH), SEARCH))
    before = SearchLog(storage, SEARCH)
    longer = experiment(max_trials=14, max_length={"batches": 128})
    search = Search(longer, SearchLog(storage, SEARCH), SEARCH)
    train(search)
    after = SearchLog(storage, SEARCH)
    assert what(after.events)[: len(before.events)] == what(before.events)
    assert len(search.state.trials) == 14
    assert max(trial.batches for trial in search.state.trials) == 128
    with pytest.raises(ConfigError, match=r"searcher\.max_trials: .* was 14, is 9"):
        Search(experiment(max_length={"batches": 128}), SearchLog(storage, SEARCH), SEARCH)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"divisor": 4}, "searcher.divisor: was 2.0, is 4.0"),
        ({"metric": "accuracy"}, 'searcher.metric: was "loss", is "accuracy"'),
        ({"num_rungs": 2}, "searcher.num_rungs: was 3, is 2"),
    ],
)
def test_other_settings_begin_another_search(
    storage: Any, changed: dict[str, Any], said: str
) -> None:
    """The error names each, and the way to begin a new one."""
    Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    with pytest.raises(ConfigError) as error:
        Search(experiment(**changed), SearchLog(storage, SEARCH), SEARCH)
    assert said in str(error.value)
    assert "without --resume" in str(error.value)


def test_results_on_other_data_are_not_compared(storage: Any) -> None:
    """A retraining's search has the data of that run."""
    of_may, of_june = (
        SearchExperiment.from_mapping({**experiment().model_dump(), "data": {"until": month}})
        for month in ("may", "june")
    )
    Search(of_may, SearchLog(storage, SEARCH), SEARCH)
    Search(of_may, SearchLog(storage, SEARCH), SEARCH)
    with pytest.raises(ConfigError, match=r"begin a new one without --resume.* data: has changed"):
        Search(of_june, SearchLog(storage, SEARCH), SEARCH)


def test_failed_trials_are_recorded_and_end_a_search_that_has_too_many(storage: Any) -> None:
    """Those with invalid hyperparameters are replaced, and do not count."""
    log = SearchLog(storage, SEARCH)
    search = Search(experiment(max_failed_trials=1), log, SEARCH)
    for number in range(3):
        leg = search.next(())
        assert leg is not None
        assert leg.trial.number == number
        search.failed(leg, "width 8 is not divisible by 3", is_invalid=True)
    leg = search.next(())
    assert leg is not None
    search.failed(leg, "out of memory")
    leg = search.next(())
    assert leg is not None
    with pytest.raises(SearchError, match=r"2 trials .* more than searcher\.max_failed_trials=1"):
        search.failed(leg, "out of memory")
    again = Search(experiment(max_failed_trials=5), SearchLog(storage, SEARCH), SEARCH)
    train(again)
    states = [trial.status for trial in again.state.trials]
    assert states.count("invalid") == 3
    assert states.count("failed") == 2
    assert len(states) == 9 + 3


def test_a_trial_gets_plain_hyperparameters(storage: Any) -> None:
    """The same ones whatever came before, and its experiment is one that `train` takes."""
    search = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    leg = search.next(())
    assert leg is not None
    assert type(leg.config) is ExperimentConfig
    assert leg.config.searcher.name == "single"
    assert leg.config.hyperparameters == leg.trial.hyperparameters
    assert 1e-4 <= leg.config.hyperparameters["lr"] <= 0.1
    assert leg.config.hyperparameters["width"] == 8
    assert experiment().sample(5) == experiment().sample(5) != experiment().sample(6)


def test_lengths_are_in_words() -> None:
    assert [in_unit(length, "epochs") for length in (1, 3)] == ["1 epoch", "3 epochs"]
    assert [in_unit(length, "batches") for length in (1, 3)] == ["1 batch", "3 batches"]


def test_a_grid_has_determineds_points_in_its_order() -> None:
    """By the names of hyperparameters, the last one fastest; choices with ranges are expanded."""
    points = experiment(name="grid", max_trials=None).points
    optimizers = ["adam", {"momentum": 0.5}, {"momentum": 0.9}]
    rates = [1e-4, 10**-2.5, 0.1]
    expected = itertools.product([1, 4], rates, optimizers)
    assert [(point["layers"], point["lr"], point["optimizer"]) for point in points] == [
        (layers, pytest.approx(rate), optimizer) for layers, rate, optimizer in expected
    ]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [({"accuracy": 0.5}, 'searcher.metric "loss" is not among'), ({}, "none")],
)
def test_a_metric_that_is_not_reported(storage: Any, metrics: dict[str, Any], said: str) -> None:
    search = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    leg = search.next(())
    assert leg is not None
    with pytest.raises(SearchError, match=said):
        search.reached(leg, 16, metrics, None)


def test_a_metric_that_is_not_finite_is_the_worst(storage: Any) -> None:
    """It waits behind all others, and is never the best."""
    search = Search(experiment(), SearchLog(storage, SEARCH), SEARCH)
    for value in (math.nan, 3.0, math.inf):
        leg = search.next(())
        assert leg is not None
        search.reached(leg, 16, {"loss": value}, None)
    best = search.state.best
    assert best is not None
    assert best[1].metric == 3.0
    waits = described(search.state, search.state.trials[0], "batches")
    assert waits == "waits: 2nd of 3 at 16 batches"


def test_trackers_show_the_trials_of_a_search_as_a_group(storage: Any) -> None:
    """Unless the experiment names another group, or the tracker has none."""
    trackers = ["mlflow", {"wandb": {"group": "mine"}}, "tensorboard"]
    fields = {**experiment().model_dump(mode="json"), "trackers": trackers}
    config = SearchExperiment.from_mapping(fields)
    leg = Search(config, SearchLog(storage, SEARCH), SEARCH).next(())
    assert leg is not None
    assert leg.config.trackers == [
        {"mlflow": {"group": SEARCH}}, {"wandb": {"group": "mine"}}, {"tensorboard": {}}
    ]  # fmt: skip


def test_trials_with_invalid_hyperparameters_alone_end_the_search(storage: Any) -> None:
    """Each is replaced, but not for ever."""
    search = Search(experiment(max_trials=3), SearchLog(storage, SEARCH), SEARCH)

    def fail(times: int) -> None:
        for _ in range(times):
            leg = search.next(())
            assert leg is not None
            search.failed(leg, "not divisible", is_invalid=True)

    fail(8)
    with pytest.raises(SearchError, match=r"9 trials .*had invalid hyperparameters.*only 3 trials"):
        fail(1)


def test_a_log_chooses_no_trial(storage: Any) -> None:
    """Else who writes to the storage could have any trial trained further, or taken over."""
    log = SearchLog(storage, SEARCH)
    search = Search(experiment(), log, SEARCH)
    leg = search.next(())
    assert leg is not None
    key = layout.numbered_key(layout.search_folder(SEARCH), 2)
    other = storage.read(key).replace(leg.trial.id.encode(), b"toy-0123456789ab")
    storage.delete(key)
    storage.write(key, other)
    with pytest.raises(SearchError, match=r"was altered: its trial 0 is toy-.*, not toy-0123"):
        Search(experiment(), SearchLog(storage, SEARCH), SEARCH)


def test_maxima_of_a_log_are_bounded() -> None:
    """Whatever they are, they are compared at once."""
    plan = BracketPlan((10**10,), 4, 2, 3.0)
    longer = BracketPlan((10**10, 2 * 10**10), 4, 2, 3.0)
    assert longer.continues(plan)
    assert not BracketPlan((10**10, 5), 4, 2, 3.0).continues(plan)
    for trials, side_by_side in ((10**10, 2), (4, 10**10)):
        assert not BracketPlan((10**10,), trials, side_by_side, 3.0).continues(plan)


def test_a_grid_whose_points_cannot_be_made_is_refused() -> None:
    """A range from which one value can be drawn may have others that no number holds."""
    lr = {"type": "log", "minval": -4, "maxval": 340, "count": 3}
    with pytest.raises(ConfigError, match="cannot draw a value"):
        SearchExperiment.from_mapping({
            "name": "toy", "entrypoint": "m:Trial", "hyperparameters": {"lr": lr},
            "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 4}},
        })  # fmt: skip


def test_a_sampler_in_the_code_folder_is_found(storage: Any, tmp_path: Path) -> None:
    """As the entrypoint is, wherever the command runs."""
    (tmp_path / "sampler_beside.py").write_text(
        "class Own:\n  def ask(self): return {'depth': 3}\n  def tell(self, **_): pass\n"
    )
    fields = experiment(name="custom", sampler="sampler_beside:Own").model_dump(mode="json")
    config = SearchExperiment.from_mapping({**fields, "code": str(tmp_path)})
    leg = Search(config, SearchLog(storage, SEARCH), SEARCH).next(())
    assert leg is not None
    assert leg.config.hyperparameters == {"depth": 3}
    assert str(tmp_path) not in sys.path


def test_curves_keep_the_numbers_of_their_trials(tmp_path: Path) -> None:
    """A trial without a result has no rows in what `search show --csv` prints."""
    (tmp_path / "curves.csv").write_text("trial,length,metric\n2,4,0.5\n0,4,0.25\n")
    assert read_curves(tmp_path / "curves.csv") == [[(4, 0.25)], [], [(4, 0.5)]]
    search = simulate(experiment(max_trials=3, num_rungs=1), read_curves(tmp_path / "curves.csv"))
    assert [trial.status for trial in search.state.trials] == ["ended", "failed", "ended"]


OTHER_VALUES: dict[str, Any] = {
    "num_rungs": 2, "max_rungs": 2, "mode": "aggressive", "bracket_rungs": [2], "divisor": 3,
    "stop_once": True, "sampler_options": {"seed": 3},
}  # fmt: skip
"""Settings that some searchers use, with others than the default values."""


@pytest.mark.parametrize(
    ("searcher", "used"),
    [
        ({"name": "random"}, []),
        ({"name": "grid"}, []),
        ({"name": "asha"}, ["divisor", "num_rungs", "stop_once"]),
        ({"name": "asha", "num_rungs": 1}, ["num_rungs"]),
        ({"name": "adaptive_asha"}, ["bracket_rungs", "divisor", "stop_once"]),
        (
            {"name": "adaptive_asha", "bracket_rungs": []},
            ["divisor", "max_rungs", "mode", "stop_once"],
        ),
        ({"name": "pasha"}, ["divisor", "num_rungs"]),
        (
            {"name": "custom", "sampler": "m:Own"},
            ["divisor", "num_rungs", "sampler_options", "stop_once"],
        ),
        ({"name": "custom", "sampler": "m:Own", "num_rungs": 1}, ["num_rungs", "sampler_options"]),
    ],
)
def test_a_setting_that_a_searcher_does_not_use_is_told(
    searcher: dict[str, Any], used: list[str]
) -> None:
    """Each once, by its path; the search runs without it. One with its default value is not."""
    common = {"metric": "loss", "max_length": {"batches": 64}, "max_trials": 9}
    fields = {"name": "toy", "entrypoint": "m:Trial", "hyperparameters": RANGES}
    given = {**OTHER_VALUES, **searcher, **common}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExperimentWarning)
        config = SearchExperiment.from_mapping({**fields, "searcher": given})
    told = [str(each.message) for each in caught if each.category is IgnoredFieldWarning]
    names = [text.partition(": ignored: ")[0] for text in told]
    given_values = {name for name in OTHER_VALUES if given[name]}
    assert sorted(names) == [f"searcher.{name}" for name in sorted(given_values - {*used})]
    assert all(searcher["name"] in text for text in told)
    left = {name: given[name] for name in used}
    without = SearchExperiment.from_mapping({**fields, "searcher": {**searcher, **common, **left}})
    assert config.recorded() == without.recorded()
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredFieldWarning)
        sent = SearchExperiment.from_mapping(config.model_dump(mode="json"))
    assert sent == config


def test_a_setting_without_effect_is_told_once(storage: Any) -> None:
    """Not again for a trial, when the search continues, or when its log is read, not even a log
    that has it."""
    with pytest.warns(IgnoredFieldWarning, match=r"^searcher\.stop_once: ignored: .* pasha"):
        config = experiment(name="pasha", stop_once=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Search(config, SearchLog(storage, SEARCH), SEARCH), 2)
        key = layout.numbered_key(layout.search_folder(SEARCH), 1)
        stored = storage.read(key)
        storage.delete(key)
        assert b'"stop_once": false' in stored
        storage.write(key, stored.replace(b'"stop_once": false', b'"stop_once": true'))
        train(Search(config, SearchLog(storage, SEARCH), SEARCH))
        assert stored_view(storage, SEARCH).state.is_over
