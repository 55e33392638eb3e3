"""Searches with real logs, driven without training: a formula gives each trial's metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trial_core.checkpoint.storage.base import Storage
from trial_core.search.log import SearchLog
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment

RANGES: Mapping[str, Any] = {
    "optimizer": {"lr": {"type": "log", "minval": -4, "maxval": -1, "count": 4}},
    "depth": {"type": "int", "minval": 1, "maxval": 8, "count": 2},
    "kind": {"type": "categorical", "vals": ["relu", "gelu", "silu"]},
    "seed": 7,
}


def search_experiment(
    ranges: Mapping[str, Any] = RANGES, experiment: str = "toy", **searcher: Any
) -> SearchExperiment:
    """An experiment with the searcher asha of 16 trials on 3 rungs of 4, 16 and 64 batches."""
    settings = {
        "name": "asha", "metric": "loss", "max_trials": 16, "num_rungs": 3, "divisor": 4,
        "max_length": {"batches": 64}, "max_concurrent_trials": 4,
    }  # fmt: skip
    fields = {"name": experiment, "entrypoint": "toy:Toy", "hyperparameters": dict(ranges)}
    return SearchExperiment.model_validate({**fields, "searcher": {**settings, **searcher}})


def metric_of(hyperparameters: Mapping[str, Any], length: int) -> float:
    """Best at lr 0.003, a bit better with depth 8, and with more batches."""
    lr = hyperparameters.get("optimizer", {}).get("lr", 1.0)
    return abs(math.log10(lr) + 2.5) + (8 - hyperparameters.get("depth", 8)) / 100 + 1 / length


def searched(
    storage: Storage,
    search: str = "toy-00000000beef",
    experiment: SearchExperiment | None = None,
    failures: Mapping[int, str] | None = None,
    results: int | None = None,
) -> Search:
    """A search in a storage.

    Args:
        failures: trials that fail at their first rung, and why.
        results: ends after so many results; None: when nothing is due.
    """
    found = Search(experiment or search_experiment(), SearchLog(storage, search), search)
    while results != 0 and (leg := found.next(())) is not None:
        number, length = leg.trial.number, int(leg.until.value)  # type: ignore[arg-type]
        if not leg.trial.reached and number in (failures or {}):
            found.failed(leg, (failures or {})[number], is_invalid=False)
        else:
            metric = metric_of(leg.trial.hyperparameters, length)
            name = found.experiment.searcher.metric
            found.reached(leg, length, {name: metric}, f"uuid-{number}-{length}")
        results = results and results - 1
    return found
