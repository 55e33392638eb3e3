"""Values drawn from search ranges: a run of Determined's YAML trains one trial."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trial_core.config.test_determined import experiment, problems
from trial_core.config import ExperimentConfig, ExperimentWarning
from trial_core.config.search_ranges import draw

pytestmark = pytest.mark.filterwarnings("ignore:.*is drawn from its search range")

RANGES: dict[str, Any] = {
    "layers": {"type": "int", "minval": 2, "maxval": 5},
    "optimizer": {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
        "momentum": {"type": "double", "minval": 0.5, "maxval": 0.75},
        "name": {"type": "categorical", "vals": ["sgd", "adam"]},
    },
    "kernel": {"type": "gaussian", "minval": 3},
    "depths": [1, {"type": "int", "minval": 7, "maxval": 7}],
    "choice": {"type": "categorical", "vals": [{"a": {"type": "int", "minval": 5, "maxval": 5}}]},
}


@pytest.mark.parametrize("seed", range(20))
def test_values_are_within_their_ranges(seed: int) -> None:
    """At every depth; constants and other mappings stay what they are."""
    drawn = draw(RANGES, seed)
    assert drawn["layers"] in (2, 3, 4, 5)
    assert 1e-4 <= drawn["optimizer"]["lr"] <= 1e-2
    assert 0.5 <= drawn["optimizer"]["momentum"] <= 0.75
    assert drawn["optimizer"]["name"] in ("sgd", "adam")
    assert (drawn["kernel"], drawn["depths"]) == (RANGES["kernel"], [1, 7])
    assert drawn["choice"] == {"a": 5}


def test_the_seed_decides() -> None:
    """Ranks and attempts with one seed draw the same values, whatever else is drawn or fixed."""
    assert draw(RANGES, 1) == draw(RANGES, 1)
    assert len({draw(RANGES, seed)["optimizer"]["lr"] for seed in range(20)}) == 20
    fixed = {"layers": 3, "optimizer": RANGES["optimizer"]}
    assert draw(fixed, 1)["optimizer"] == draw(RANGES, 1)["optimizer"]


def test_an_experiment_draws_one_value_and_says_which() -> None:
    """Its plain data have the value, so a run, its ranks and a resume see no range."""
    search = {"type": "log", "minval": -4, "maxval": -1}
    seed = {"experiment_seed": 3}
    with pytest.warns(ExperimentWarning, match=r"hyperparameters.adam.lr: .* is drawn from its"):
        config = experiment(hyperparameters={"adam": {"lr": search}}, reproducibility=seed)
    assert 1e-4 <= config.hyperparameters["adam"]["lr"] <= 1e-1
    assert ExperimentConfig.from_mapping(config.model_dump(mode="json")) == config
    assert (
        config.digest()
        == experiment(hyperparameters=config.hyperparameters, reproducibility=seed).digest()
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "int", "minval": 2},
        {"type": "int", "minval": 3, "maxval": 2},
        {"type": "double", "minval": 1.5, "maxval": 0.5},
        {"type": "log", "minval": "small", "maxval": 2},
        {"type": "categorical", "vals": []},
        {"type": "categorical", "vals": 3},
        {"type": "categorical", "vals": "adam"},
        {"type": "categorical", "minval": 3},
        {"type": "log", "minval": 9e9, "maxval": 9e9},
        {"type": "log", "minval": -4, "maxval": -2, "base": 0},
        {"type": "log", "minval": -4, "maxval": -2, "base": -10},
        {"type": "double", "minval": -1.7e308, "maxval": 1.7e308},
    ],
)
def test_a_range_without_a_value_is_refused(wrong: dict[str, Any]) -> None:
    """The message names the hyperparameter, and says what a range needs."""
    (problem,) = problems(hyperparameters={"lr": wrong})
    assert problem.startswith("hyperparameters.lr: cannot draw a value from this search range")
