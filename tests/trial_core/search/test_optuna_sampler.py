"""Optuna's samplers choose a search's hyperparameters, and a search becomes an Optuna study."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, SearchError, StorageError
from trial_core.search.log import Begun, Exited, NoMore, RungReached, SearchLog
from trial_core.search.optuna_sampler import distributions, params_of, store_study
from trial_core.search.search import Leg, Search, sampler_of
from trial_core.search.settings import SearchExperiment
from trial_core.search.view import stored_view

SEARCH = "toy-search-0000beef"
TPE = "optuna.samplers:TPESampler"
HERE = __name__
RANGES: dict[str, Any] = {
    "x": {"type": "double", "minval": -10.0, "maxval": 10.0},
    "deep": {"lr": {"type": "log", "base": 2, "minval": -8, "maxval": -2}},
    "layers": [1, {"type": "int", "minval": 1, "maxval": 3}],
    "optimizer": {
        "type": "categorical",
        "vals": [
            "sgd", 7, {"name": "adam", "beta": {"type": "double", "minval": 0.5, "maxval": 0.9}},
            {"name": "lion", "beta": {"type": "int", "minval": 2, "maxval": 4}},
        ],
    },
    "constant": {"a": [1, 2]},
}  # fmt: skip
QUADRATIC: dict[str, Any] = {
    name: {"type": "double", "minval": -10.0, "maxval": 10.0} for name in ("x", "y")
}


def experiment(
    ranges: dict[str, Any], sampler: str | None = TPE, seed: int = 0, **searcher: Any
) -> SearchExperiment:
    settings: dict[str, Any] = {
        "name": "custom", "metric": "loss", "max_length": {"batches": 16}, "max_trials": 40,
        "max_concurrent_trials": 1, "sampler": sampler, "smaller_is_better": True,
    }  # fmt: skip
    if sampler is None:
        settings |= {"name": "random"}
        del settings["sampler"]
    return SearchExperiment.from_mapping(
        {
            "name": "toy", "entrypoint": "m:Trial", "hyperparameters": ranges,
            "searcher": settings | searcher, "reproducibility": {"experiment_seed": seed},
        }
    )  # fmt: skip


@pytest.fixture
def storage(tmp_path: Path) -> Any:
    return CheckpointStore(f"file://{tmp_path}/checkpoints").storage


def search_of(storage: Any, of: SearchExperiment, name: str = SEARCH) -> Search:
    return Search(of, SearchLog(storage, name), name)


def train(search: Search, loss: Callable[[dict[str, Any], int], float], most: int = 999) -> None:
    for _ in range(most):
        if (leg := search.next(())) is None:
            return
        length = int(leg.until.value)  # type: ignore[arg-type]
        value = loss(dict(leg.trial.hyperparameters), length)
        search.reached(leg, length, {"loss": value}, None)


def train_side_by_side(search: Search, most: int = 3, results: int = 999) -> None:
    """Train several trials at a time, which reach their rungs in another order than they began."""
    running: list[Leg] = []
    for step in range(results):
        while len(running) < most:
            if (leg := search.next({each.trial.number for each in running})) is None:
                break
            running.append(leg)
        if not running:
            return
        leg = running.pop(step * 5 % len(running))
        length = int(leg.until.value)  # type: ignore[arg-type]
        if leg.trial.number % 5 == 2:
            search.failed(leg, "out of memory")
        else:
            search.reached(leg, length, {"loss": float(leg.trial.number * 7 % 11)}, None)


def hyperparameters_of(search: Search) -> list[Any]:
    return [trial.hyperparameters for trial in search.state.trials]


def quadratic(values: dict[str, Any], length: int) -> float:
    return float((values["x"] - 3) ** 2 + (values["y"] + 5) ** 2 + 1 / length)


def test_tpe_finds_better_points_than_chance(storage: Any) -> None:
    """In 40 trials, on most seeds: it is told of what has come of its points."""
    wins = 0
    for seed in range(3):
        best = []
        for sampler in (TPE, None):
            search = search_of(
                storage,
                experiment(QUADRATIC, sampler, seed),
                f"toy-search-0000{seed}{bool(sampler):d}",
            )
            train(search, quadratic)
            assert search.state.best is not None
            best.append(search.state.best[1].metric or 0.0)
        wins += best[0] < best[1]
    assert wins >= 2


def test_a_search_that_stops_after_every_record_is_the_same(storage: Any) -> None:
    """The sampler has its history again: its next points are those of a search without a stop."""
    whole = search_of(storage, experiment(QUADRATIC, max_trials=20))
    train(whole, quadratic)
    other = "toy-search-0000cafe"
    while not (
        search := search_of(storage, experiment(QUADRATIC, max_trials=20), other)
    ).state.is_over:
        train(search, quadratic, 1)
    assert [trial.hyperparameters for trial in search.state.trials] == [
        trial.hyperparameters for trial in whole.state.trials
    ]
    other_seed = search_of(
        storage, experiment(QUADRATIC, seed=1, max_trials=1), "toy-search-0000d00d"
    )
    train(other_seed, quadratic)
    assert other_seed.state.trials[0].hyperparameters != whole.state.trials[0].hyperparameters


@pytest.mark.parametrize("sampler", ["TPESampler", "RandomSampler", "NSGAIISampler", "QMCSampler"])
def test_values_are_of_their_ranges(storage: Any, sampler: str) -> None:
    """At every depth, choices with ranges included; and the parameters are found again."""
    of = experiment(RANGES, f"optuna.samplers:{sampler}")
    search = search_of(storage, of)
    train(search, lambda values, length: values["x"] ** 2)
    chosen = set()
    for trial in search.state.trials:
        found: Any = trial.hyperparameters
        assert found["constant"] == {"a": [1, 2]}
        assert -10 <= found["x"] <= 10
        assert 2**-8 <= found["deep"]["lr"] <= 2**-2
        assert found["layers"][0] == 1
        assert found["layers"][1] in (1, 2, 3)
        choice = found["optimizer"]
        index = params_of(of, found)["optimizer"][1]
        chosen.add(index)
        if index in "01":
            assert choice == RANGES["optimizer"]["vals"][int(index)]
        elif index == "2":
            assert choice["name"] == "adam"
            assert 0.5 <= choice["beta"] <= 0.9
        else:
            assert choice["name"] == "lion"
            assert choice["beta"] in (2, 3, 4)
    assert chosen == set("0123")


def test_distributions(storage: Any) -> None:
    """Their names are places; a choice's own ranges have its index."""
    found = distributions(experiment(RANGES))
    assert {name: type(each).__name__[:-12] for name, each in found.items()} == {
        "x": "Float", "deep.lr": "Float", "layers[1]": "Int", "optimizer": "Categorical",
        "optimizer[2].beta": "Float", "optimizer[3].beta": "Int",
    }  # fmt: skip
    assert found["deep.lr"].log  # type: ignore[union-attr]
    assert found["optimizer"].choices == ("0", "1", "2", "3")  # type: ignore[union-attr]


def test_a_range_that_optuna_does_not_take(storage: Any) -> None:
    """It is refused before a trial begins."""
    ranges = {"x": {"type": "log", "base": 10, "minval": -400, "maxval": -399}}
    with pytest.raises(ConfigError, match=r"hyperparameters\.x: not a range for Optuna"):
        search_of(storage, experiment(ranges))


def loss_at_rungs(values: dict[str, Any], length: int) -> float:
    return quadratic(values, length) if values["x"] > -9 else math.nan


def rungs_search(storage: Any) -> Search:
    search = search_of(
        storage,
        experiment(QUADRATIC, max_trials=12, num_rungs=3, divisor=2, max_concurrent_trials=3),
    )
    leg = search.next(())
    assert leg is not None
    search.failed(leg, "out of memory")
    train(search, loss_at_rungs)
    return search


def test_the_sampler_is_told_of_every_rung(storage: Any) -> None:
    """Results at rungs below the last are pruned trials; a failed one has failed; also later."""
    first = rungs_search(storage)
    again = search_of(storage, first.experiment)
    for search in (first, again):
        trials = search._sampler._study.trials  # type: ignore[attr-defined]
        results = [result for trial in search.state.trials for result in trial.reached]
        assert len(trials) == len(results) + 1
        finite = sorted(
            (result.length, result.metric) for result in results if result.metric is not None
        )
        assert finite == sorted(
            (each.last_step, each.value) for each in trials if each.value is not None
        )
        assert {each.state for each in trials if each.value is not None} == {
            TrialState.COMPLETE, TrialState.PRUNED,
        }  # fmt: skip
        failed = [each for each in trials if each.state == TrialState.FAIL]
        assert len(failed) == 1 + sum(result.metric is None for result in results)


def test_a_search_is_an_optuna_study(storage: Any, tmp_path: Path) -> None:
    """Optuna loads it: trials, values at rungs, states, parameters, direction and best."""
    search = rungs_search(storage)
    url = f"sqlite:///{tmp_path}/study.db"
    store_study(search.experiment, search.state, url)
    study = optuna.load_study(study_name="toy", storage=url)
    assert len(study.trials) == 12
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    for trial, frozen in zip(search.state.trials, study.trials, strict=True):
        assert frozen.params == trial.hyperparameters
        assert frozen.user_attrs["trial"] == trial.id
        assert frozen.intermediate_values == {
            each.length: each.metric for each in trial.reached if each.metric is not None
        }
    assert study.trials[0].state == TrialState.FAIL
    full = [t.reached[-1].metric for t in search.state.trials if t.reached and t.rung == 2]
    assert study.best_value == min(filter(None, full))
    with pytest.raises(SearchError, match="there is an Optuna study 'toy'"):
        store_study(search.experiment, search.state, url)
    store_study(search.experiment, search.state, url, "another")
    with pytest.raises(SearchError, match="no Optuna study can be stored"):
        store_study(search.experiment, search.state, f"sqlite:///{tmp_path}/none/study.db")


def test_a_search_that_is_not_over_is_a_study(storage: Any, tmp_path: Path) -> None:
    """Also with hyperparameters that the ranges do not give: they are user attributes."""
    search = search_of(storage, experiment(QUADRATIC, f"{HERE}:Plain", sampler_options={"most": 2}))
    leg = search.next(())
    assert leg is not None
    store_study(search.experiment, search.state, url := f"sqlite:///{tmp_path}/study.db")
    (trial,) = optuna.load_study(study_name=None, storage=url).trials
    assert (trial.state, trial.params) == (TrialState.RUNNING, {})
    assert trial.user_attrs["hyperparameters"] == {"x": 100}


# ------------------------------------------------------------------------ objects with ask and tell


class Plain:
    """Gives so many hyperparameters, and remembers what it is told."""

    told: ClassVar[list[Any]] = []

    def __init__(self, most: int, gives: Any = None) -> None:
        self.most = most
        self.gives = gives
        Plain.told = []

    def ask(self) -> Any:
        if self.gives == "raise":
            raise KeyError("lost")
        self.most -= 1
        if self.most < 0:
            return None
        return {"x": 100} if self.gives is None else self.gives

    def tell(self, trial: int, hyperparameters: dict[str, Any], rung: int, metric: Any) -> None:
        if metric == -1:
            raise RuntimeError("cannot fit")
        Plain.told.append((trial, hyperparameters, rung, metric))


class NoAsk:
    """Has no ask."""

    def tell(self, **_: Any) -> None:
        pass


def plain(max_trials: int = 40, **options: Any) -> SearchExperiment:
    return experiment(
        QUADRATIC, f"{HERE}:Plain", sampler_options=options, num_rungs=2, divisor=2,
        max_concurrent_trials=2, max_trials=max_trials,
    )  # fmt: skip


def test_a_sampler_that_has_no_more_ends_the_search(storage: Any) -> None:
    """Those that wait are trained as far as the rules say; then nothing is due."""
    search = search_of(storage, plain(most=5))
    first = search.next(())
    assert first is not None
    running = {first.trial.number}
    train(search, lambda values, length: 1.0)
    assert len(search.state.trials) == 5
    assert search.state.is_over
    assert search.state.progress == 1.0
    assert max(trial.rung for trial in search.state.trials) == 1
    assert running == {0}
    assert Plain.told[0] == (0, {"x": 100}, 0, 1.0)
    stored = stored_view(storage, SEARCH).summary()
    assert (stored["is_over"], stored["progress"], stored["trials"]) == (True, 1.0, 5)


@pytest.mark.parametrize("max_trials", [40, 50])
def test_a_sampler_is_asked_again_when_its_search_continues(storage: Any, max_trials: int) -> None:
    """As it may have more by then. What it says is recorded once, however often it is asked."""
    train(search_of(storage, plain(most=5)), lambda values, length: 1.0)
    none = Search(plain(most=5), SearchLog(storage, SEARCH), SEARCH, sampler_of(plain(most=0)))
    assert none.state.is_over
    assert [none.next(()), none.next(())] == [None, None]
    assert [type(event) for event in none.events].count(NoMore) == 1
    assert none.state.is_over
    again = search_of(storage, plain(most=5, max_trials=max_trials))
    leg = again.next(())
    assert leg is not None
    assert not stored_view(storage, SEARCH).state.is_over
    train(again, lambda values, length: 1.0)
    assert len(again.state.trials) == 10
    assert [type(event) for event in again.events].count(NoMore) == 2
    assert stored_view(storage, SEARCH).state.is_over


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", ["GridSampler", "BruteForceSampler"])
def test_a_sampler_that_has_tried_everything_ends_the_search(storage: Any, sampler: str) -> None:
    """Optuna's say so by `Study.stop`, once they are told of the last point."""
    ranges = {"x": {"type": "int", "minval": 1, "maxval": 3}}
    options = {"search_space": {"x": [1, 2, 3]}} if sampler == "GridSampler" else {}
    of = experiment(ranges, f"optuna.samplers:{sampler}", sampler_options=options, max_trials=9)
    search = search_of(storage, of)
    train(search, lambda values, length: 1.0)
    assert sorted(trial.hyperparameters["x"] for trial in search.state.trials) == [1, 2, 3]
    assert search.state.is_over
    assert stored_view(storage, SEARCH).state.is_over


def test_a_grid_of_optunas_has_each_point_once(storage: Any) -> None:
    """Whatever the seed, side by side, with a trial that fails, and when its search continues."""
    ranges = {
        "x": {"type": "int", "minval": 1, "maxval": 3},
        "y": {"type": "double", "minval": 0.0, "maxval": 1.0},
    }  # fmt: skip
    grid: dict[str, list[float]] = {"x": [1, 2, 3], "y": [0.0, 0.5]}
    orders = set()
    for seed in range(10):
        of = experiment(
            ranges, "optuna.samplers:GridSampler", seed, sampler_options={"search_space": grid},
            max_concurrent_trials=4, num_rungs=2, divisor=2,
        )  # fmt: skip
        name = f"toy-search-{seed:08x}"
        while not (search := search_of(storage, of, name)).state.is_over:
            train_side_by_side(search, results=3)
        points = tuple((found["x"], found["y"]) for found in hyperparameters_of(search))
        assert sorted(points) == list(itertools.product(grid["x"], grid["y"]))
        orders.add(points)
    assert len(orders) > 1


@pytest.mark.parametrize("options", [{}, {"seed": 3}])
def test_a_scrambled_sequence_of_optunas_is_one_sequence(
    storage: Any, options: dict[str, int]
) -> None:
    """Its points cover the range evenly, also when its search continues after every record."""
    of = experiment(
        {"x": {"type": "double", "minval": 0.0, "maxval": 1.0}}, "optuna.samplers:QMCSampler",
        sampler_options={"scramble": True, **options}, max_trials=9,
    )  # fmt: skip
    while not (search := search_of(storage, of)).state.is_over:
        train(search, lambda values, length: values["x"], 1)
    _, *points = (found["x"] for found in hyperparameters_of(search))  # the first one is by chance
    assert sorted(int(8 * point) for point in points) == list(range(8))


def test_a_sampler_without_more_does_not_end_a_search_that_trains(storage: Any) -> None:
    """It may have more once it is told of those."""
    search = search_of(storage, plain(most=1))
    assert search.next(()) is not None
    assert search.next({0}) is None
    assert not search.state.is_over
    assert not any(isinstance(event, NoMore) for event in search.events)


def test_a_sampler_is_told_once_of_each_result_in_order(storage: Any) -> None:
    """With the rung of the result, not of the next; again in that order when a search continues.

    A trial that has neither a result nor failed is not told of.
    """
    search = search_of(storage, plain(most=12))
    train_side_by_side(search, results=7)
    search.next(range(12))
    assert any(trial.status == "due" and not trial.reached for trial in search.state.trials)
    counts = dict.fromkeys(range(12), 0)
    expected = []
    for event in search.events:
        if isinstance(event, (RungReached, Exited)):
            metric = event.metric if isinstance(event, RungReached) else None
            expected.append((event.trial, {"x": 100}, counts[event.trial], metric))
            counts[event.trial] += 1
    assert {rung for _, _, rung, _ in expected} == {0, 1}
    assert None in {metric for *_, metric in expected}
    assert Plain.told == expected
    search_of(storage, plain(most=12))
    assert Plain.told == expected


def test_optunas_study_is_the_same_when_a_search_continues(storage: Any) -> None:
    """Its trials are in the order in which they began and had results, those that are due too."""
    of = experiment(QUADRATIC, max_trials=20, num_rungs=3, divisor=2, max_concurrent_trials=4)
    search = search_of(storage, of)
    train_side_by_side(search, most=4, results=20)
    studies = [
        [
            (each.number, each.params, each.state, each.values, each.intermediate_values)
            for each in found._sampler._study.trials  # type: ignore[attr-defined]
        ]
        for found in (search, search_of(storage, of))
    ]
    assert studies[0] == studies[1]
    assert {state for _, _, state, _, _ in studies[0]} == {
        TrialState.PRUNED, TrialState.FAIL, TrialState.COMPLETE, TrialState.RUNNING
    }  # fmt: skip


@pytest.mark.parametrize("sampler", [f"{HERE}:Nothing", f"{HERE}:NoAsk"])
def test_a_search_without_its_sampler_leaves_nothing(storage: Any, sampler: str) -> None:
    """No record says that it has begun, so nothing is there to continue or to list."""
    with pytest.raises(ConfigError, match=r"searcher\.sampler"):
        search_of(storage, experiment(QUADRATIC, sampler))
    assert storage.sizes("searches") == {}


def test_what_is_due_is_not_held_up_by_new_trials(storage: Any) -> None:
    """A trial is promoted while a new trial, which came due earlier, cannot begin."""
    search = search_of(storage, plain(most=2))
    legs = [search.next(()), search.next({0})]
    for leg in legs:
        assert leg is not None
        search.reached(leg, 8, {"loss": float(leg.trial.number)}, None)
    promoted = search.next(())
    assert promoted is not None
    assert (promoted.trial.number, promoted.trial.rung) == (0, 1)


@pytest.mark.parametrize(
    ("gives", "error", "said"),
    [
        ("raise", SearchError, "failed: KeyError: 'lost'"),
        ([1], SearchError, "gave list for trial 0, expected a dict"),
        ({"x": object()}, ConfigError, "hyperparameters"),
    ],
)  # fmt: skip
def test_what_a_sampler_must_not_give(storage: Any, gives: Any, error: Any, said: str) -> None:
    """An error that says what; nothing is recorded."""
    if isinstance(gives, dict):
        Objects.given = gives
        of = experiment(QUADRATIC, f"{HERE}:Objects")
    else:
        of = plain(most=1, gives=gives)
    search = search_of(storage, of)
    with pytest.raises(error, match=said):
        search.next(())
    assert len(SearchLog(storage, SEARCH).events) == 1


class Counting:
    """Gives other hyperparameters whenever it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> Any:
        self.asked += 1
        return {"x": self.asked}

    def tell(self, **_: Any) -> None:
        pass


@pytest.mark.parametrize("is_written", [False, True])
def test_a_trial_whose_answer_was_lost_has_the_hyperparameters_of_its_record(
    storage: Any, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """The sampler is not asked again for it; the next trial has the next ones."""
    search = search_of(storage, experiment(QUADRATIC, f"{HERE}:Counting"))
    create = storage.create

    def fail(key: str, data: bytes) -> None:
        if is_written:
            create(key, data)
        raise StorageError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", fail)
        with pytest.raises(StorageError, match="no answer"):
            search.next(())
    train(search, lambda values, length: 1.0, 3)
    trials = search.state.trials
    assert [trial.hyperparameters["x"] for trial in trials] == [1, 2, 3]
    assert SearchLog(storage, SEARCH).events == search.events


class Objects:
    """Gives what cannot be stored."""

    given: ClassVar[Any] = None

    def ask(self) -> Any:
        return self.given

    def tell(self, **_: Any) -> None:
        pass


class Kind(str, Enum):
    ADAM = "adam"


class Reusing:
    """Gives the same object each time, with values whose classes are derived from plain ones."""

    def __init__(self) -> None:
        self.given: Any = {"x": 0.0, "optimizer": {Kind.ADAM: Kind.ADAM}}

    def ask(self) -> Any:
        self.given["x"] = np.float64(self.given["x"] + 1)
        self.given["optimizer"]["beta"] = np.float64(self.given["x"] / 10)
        return self.given

    def tell(self, hyperparameters: dict[str, Any], **_: Any) -> None:
        hyperparameters["optimizer"].clear()


def test_every_rung_is_trained_with_the_recorded_hyperparameters(storage: Any) -> None:
    """Whatever the sampler does with the object that it gave; they are plain data."""
    of = experiment(
        QUADRATIC, f"{HERE}:Reusing", num_rungs=2, divisor=2, max_trials=4, max_concurrent_trials=2
    )
    search = search_of(storage, of)
    trained = Counter[int]()
    while (leg := search.next(())) is not None:
        number = leg.trial.number
        recorded = {
            event.trial: event.hyperparameters
            for event in SearchLog(storage, SEARCH).events
            if isinstance(event, Begun)
        }
        beta = (number + 1) / 10
        assert recorded[number] == {"x": number + 1, "optimizer": {"adam": "adam", "beta": beta}}
        assert leg.config.hyperparameters == recorded[number]
        length = int(leg.until.value)  # type: ignore[arg-type]
        search.reached(leg, length, {"loss": number}, None)
        trained[number] += 1
    assert set(trained.values()) == {1, 2}


def test_a_sampler_that_cannot_be_told(storage: Any) -> None:
    """Its error is named; the result is recorded before."""
    search = search_of(storage, plain(most=1))
    leg = search.next(())
    assert leg is not None
    with pytest.raises(SearchError, match="failed: RuntimeError: cannot fit"):
        search.reached(leg, 8, {"loss": -1}, None)
    assert len(SearchLog(storage, SEARCH).events) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{HERE}:NoAsk", "has no ask and tell"),
        (f"{HERE}:Nothing", "cannot be used: AttributeError"),
        ("nowhere.at_all:Sampler", "cannot be used: ModuleNotFoundError"),
        ("optuna.samplers:GridSampler", "cannot be used: TypeError"),
    ],
)  # fmt: skip
def test_a_sampler_that_is_none(name: str, said: str) -> None:
    """It is refused with its name."""
    with pytest.raises(ConfigError, match=said):
        sampler_of(experiment(QUADRATIC, name))
