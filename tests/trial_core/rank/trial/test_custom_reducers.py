"""Custom reducers: metrics of all ranks' values, and the rules of wrap_reducer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trial_core.errors import TrialError
from trial_core.rank.trial.custom_reducers import FunctionReducer, MetricReducer, ReducerRegistry
from trial_core.rank.trial.metric_values import as_reported


class Mean(MetricReducer):
    """The mean of all values, which is not the mean of the ranks' means."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, *values: float) -> None:
        self.total += sum(values)
        self.count += len(values)

    def per_slot_reduce(self) -> tuple[float, int]:
        return self.total, self.count

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return float(sum(totals) / sum(counts))


class Ranks:
    """Registries of several ranks, with a simulated allgather."""

    def __init__(self, size: int) -> None:
        self.registries = [ReducerRegistry() for _ in range(size)]

    def reduce(self, kind: Any) -> list[dict[str, Any]]:
        given: list[Any] = []
        for registry in self.registries:
            registry.reduce(kind, lambda mine: _first_round(given, mine))
        return [registry.reduce(kind, lambda mine: list(given)) for registry in self.registries]


def _first_round(given: list[Any], mine: Any) -> list[Any]:
    given.append(mine)
    return [mine]


def alone(values: Any) -> list[Any]:
    return [values]


def test_reduces_over_all_ranks() -> None:
    """Ranks with different numbers of values get the metric of all values."""
    ranks = Ranks(2)
    first, second = (registry.wrap(Mean(), name="mean") for registry in ranks.registries)
    first.update(0.0)
    second.update(1.0, 1.0, 2.0)
    assert ranks.reduce("training") == [{"mean": 1.0}, {"mean": 1.0}]


def test_functions_see_the_unsharded_order() -> None:
    """A function gets all values in one list, in which the ranks alternate."""
    ranks = Ranks(3)
    updates = [
        registry.wrap(lambda values: list(values), name="seen") for registry in ranks.registries
    ]
    for value in range(7):
        updates[value % 3].update(value)
    assert ranks.reduce("validation")[0] == {"seen": [0, 1, 2, 3, 4, 5, 6]}


def test_none_is_a_value() -> None:
    """A function gets it like any other value."""
    registry = ReducerRegistry()
    registry.wrap(lambda values: values.count(None), name="nones").update(None)
    assert registry.reduce("training", alone) == {"nones": 1}


def test_a_reducer_is_used_only_in_its_workloads() -> None:
    """Both resetting and reducing."""
    registry = ReducerRegistry()
    training = registry.wrap(Mean(), name="t", for_validation=False)
    validation = registry.wrap(Mean(), name="v", for_training=False)
    training.update(1.0)
    validation.update(2.0)
    assert registry.reduce("training", alone) == {"t": 1.0}
    assert registry.reduce("validation", alone) == {"v": 2.0}
    registry.reset("validation")
    assert (training.count, validation.count) == (1, 0)
    registry.reset("training")
    assert training.count == 0


def test_reset_discards_a_functions_values() -> None:
    """After a reset a function sees only newer values."""
    registry = ReducerRegistry()
    total = registry.wrap(sum, name="total")
    total.update(5)
    registry.reset("training")
    total.update(2)
    assert registry.reduce("training", alone) == {"total": 2}


def test_one_collective_for_all_reducers() -> None:
    """Any number of reducers needs one collective; without reducers there is none."""
    registry, calls = ReducerRegistry(), []

    def allgather(values: Any) -> list[Any]:
        calls.append(values)
        return [values]

    assert registry.reduce("training", allgather) == {}
    assert calls == []
    for name in "abc":
        registry.wrap(lambda values: len(values), name=name)
    registry.reduce("training", allgather)
    assert len(calls) == 1


def test_several_metrics_without_a_name() -> None:
    """A reducer without a name returns several metrics. Tensors become arrays of NumPy."""
    registry = ReducerRegistry()
    results = {"a": torch.tensor(1.5), "b": np.array([1, 2]), "c": np.float32(0.5)}
    registry.wrap(lambda values: results)
    reduced = registry.reduce("training", alone)
    assert isinstance(reduced["a"], np.float64)
    assert isinstance(reduced["b"], np.ndarray)
    assert as_reported(reduced, "a reducer") == {"a": 1.5, "b": [1, 2], "c": 0.5}


def test_wrapping_returns_the_object_to_update() -> None:
    """The MetricReducer itself, or a FunctionReducer for a function."""
    registry, mean = ReducerRegistry(), Mean()
    assert registry.wrap(mean, name="mean") is mean
    assert isinstance(registry.wrap(max, name="max"), FunctionReducer)


def area(values: list[Any]) -> Any:
    return values[0]


@pytest.mark.parametrize(
    ("name", "returned", "message"),
    [
        ("auc", {"x": 1}, r'function area\(\) was wrapped with name="auc" but returned a dict'),
        (None, 0.5, r"area\(\) was wrapped without a name but did not return a dict .*type float"),
        (None, {1: 0.5}, r"area\(\) returned a dict with the key 1; the names of metrics must be"),
        ("auc", len, r'metric "auc" returned by reducer function area\(\) is or holds a value of '),
        (
            None,
            {"x": {"y": 1j}},
            r'metric "x" returned by reducer function area\(\) is .* of type complex',
        ),
    ],
)
def test_wrong_results_are_refused(name: str | None, returned: Any, message: str) -> None:
    """The error names the reducer and the result."""
    registry = ReducerRegistry()
    registry.wrap(area, name=name).update(returned)
    with pytest.raises(TrialError, match=message):
        registry.reduce("training", alone)


def test_names_must_differ() -> None:
    """Two reducers must not return the same metric."""
    registry = ReducerRegistry()
    registry.wrap(lambda values: 1, name="auc")
    registry.wrap(lambda values: {"auc": 2})
    with pytest.raises(TrialError, match=r"\['auc'\], which another reducer gives"):
        registry.reduce("training", alone)


def test_ranks_must_wrap_the_same() -> None:
    """The error names the rank with different reducers."""
    registry = ReducerRegistry()
    registry.wrap(Mean(), name="mean").update(1.0)
    with pytest.raises(TrialError, match=r"rank 1 wrapped \['other'\]"):
        registry.reduce("training", lambda mine: [mine, (["other"], [1])])


def test_an_error_in_a_reducer_names_it() -> None:
    """And says what to do if only evaluate_batch updates it: by default it serves both."""
    registry, advice = ReducerRegistry(), "; if train_batch does not update it, wrap it with for_tr"
    registry.wrap(Mean(), name="mean").reset()
    with pytest.raises(
        TrialError, match=f"^MetricReducer Mean .*'mean'.* ZeroDiv.*{advice}"
    ) as seen:
        registry.reduce("training", alone)
    assert isinstance(seen.value.__cause__, ZeroDivisionError)
    with pytest.raises(
        TrialError, match=r"in cross_slot_reduce, for validation metrics: \D+ zero$"
    ):
        registry.reduce("validation", alone)
    registry = ReducerRegistry()
    longest = registry.wrap(max, name="longest")
    with pytest.raises(TrialError, match=rf"^reducer function max\(\) .*longest.*{advice}"):
        registry.reduce("training", alone)
    longest.update(1)
    longest.update("a")
    with pytest.raises(
        TrialError, match=r"TypeError in cross_slot_reduce.* instances of '\w+' and '\w+'$"
    ):
        registry.reduce("training", alone)


def test_wrapping_twice_is_refused() -> None:
    """One object cannot hold the values of two metrics."""
    registry, mean = ReducerRegistry(), Mean()
    registry.wrap(mean, name="one")
    with pytest.raises(TrialError, match="type Mean was passed to wrap_reducer twice"):
        registry.wrap(mean, name="two")


def test_a_function_may_be_wrapped_twice() -> None:
    """Each wrapping has its own values."""
    registry = ReducerRegistry()
    registry.wrap(max, name="one").update(1)
    registry.wrap(max, name="two").update(2)
    assert registry.reduce("training", alone) == {"one": 1, "two": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reducer": Mean}, r"got the class Mean; pass an instance: wrap_reducer\(Mean\(\)"),
        ({"reducer": 3}, "an object of type int; a reducer is a function, or an instance"),
        ({"reducer": max, "name": 3}, "name must be a string or None, got 3"),
        (
            {"reducer": max, "for_training": False, "for_validation": False},
            r"function max\(\) .* would never be computed",
        ),
    ],
)
def test_wrong_wrapping_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The call of wrap_reducer raises, not a later workload."""
    with pytest.raises(TrialError, match=message):
        ReducerRegistry().wrap(**arguments)
