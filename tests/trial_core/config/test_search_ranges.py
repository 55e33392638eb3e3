"""Values drawn from search ranges, for debugging a trial with its own YAML."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trial_core.config.search_ranges import draw
from trial_core.errors import ConfigError

RANGES: dict[str, Any] = {
    "layers": {"type": "int", "minval": 2, "maxval": 5},
    "optimizer": {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
        "momentum": {"type": "double", "minval": 0.5, "maxval": 0.75},
        "name": {"type": "categorical", "vals": ["sgd", "adam"]},
    },
    "width": {"type": "const", "val": 64},
    "kernel": {"type": "gaussian", "minval": 3},
    "depths": [1, {"type": "int", "minval": 7, "maxval": 7}],
}


@pytest.mark.parametrize("seed", range(20))
def test_values_are_within_their_ranges(seed: int) -> None:
    """At every depth; constants and other mappings stay what they are."""
    drawn = draw(RANGES, seed)
    assert drawn["layers"] in (2, 3, 4, 5)
    assert 1e-4 <= drawn["optimizer"]["lr"] <= 1e-2
    assert 0.5 <= drawn["optimizer"]["momentum"] <= 0.75
    assert drawn["optimizer"]["name"] in ("sgd", "adam")
    assert (drawn["width"], drawn["kernel"], drawn["depths"]) == (64, RANGES["kernel"], [1, 7])


def test_the_seed_decides() -> None:
    """Ranks with the same seed draw the same values."""
    assert draw(RANGES, 1) == draw(RANGES, 1)
    assert len({draw(RANGES, seed)["optimizer"]["lr"] for seed in range(20)}) == 20


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
    ],
)
def test_a_range_without_a_value_is_refused(wrong: dict[str, Any]) -> None:
    """The message names the hyperparameter, and says what a range needs."""
    message = re.escape("hyperparameters.lr: cannot draw a value from ")
    with pytest.raises(ConfigError, match=message):
        draw({"lr": wrong}, 0)
