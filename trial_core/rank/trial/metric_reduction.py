"""Reduces metrics over all batches of all ranks, exactly once.

Each rank collects the metrics of its batches on the device, without waiting for it
(`BatchMetrics`). When the workload ends, they are moved to the host and ranks exchange sums and
extremes (`Partials`). `combine` then reduces each metric, by default to the mean over all batches
of all ranks. None values do not count. A metric with values other than numbers and arrays is not
reduced: its last value on the first rank is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from trial_core.errors import TrialError, TrialTypeError, TrialValueError
from trial_core.messages import NonFinite
from trial_core.rank.trial.metric_values import (
    Array,
    Collected,
    HostColumn,
    Value,
    as_plain,
    check_integers,
    collected,
    mean_over_ranks,
    numeric,
    stack,
    sum_of,
    to_host,
    type_of,
)


class Reducer(Enum):
    """How to reduce a metric's values of single batches to one value.

    Follows ``determined.pytorch.Reducer``. Sums and extremes of integers are exact, means are
    floats. An integer, also as a sum, is at least -2**63 and less than 2**64.

    Attributes:
        AVG: the mean.
        SUM: the sum.
        MAX: the largest value.
        MIN: the smallest value.
    """

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


class Partial(TypedDict, total=False):
    """One metric of one rank, reduced over the calls of a workload."""

    count: int  # of values that are numbers or arrays, if all others are None
    sum: Value  # over these values, if there are any
    max: Value
    min: Value
    unreduced: Any  # the last value, if other values are among them


class Partials(TypedDict, total=False):
    """One rank's metrics of a workload, by their names; empty on a rank that reports none."""

    calls: int
    metrics: dict[str, Partial]
    values: dict[str, Array | list[Any]]  # one for each call, if they were asked for


class BatchMetrics:
    """Collects the metrics that `method` returns on one rank over a workload, without waiting for
    the accelerator."""

    def __init__(self, method: str = "train_batch") -> None:
        self._method = method
        # Each metric's values, one for each call; None before the first call.
        self._columns: dict[str, list[Collected]] | None = None
        self._calls = 0
        self._hosted: dict[str, HostColumn] | None = None

    def add_call(self, outcome: torch.Tensor | Mapping[str, Any]) -> None:
        """Add the return value of one call of the method. A tensor is the metric ``loss``.

        Tensors are copied on their device, because the trial may reuse them. Raises TrialError if a
        return value is neither a tensor nor a mapping, or a metric is of a type that cannot be
        reported, or the metrics are not those of the first call.
        """
        metrics, columns = self._checked(outcome)
        for name, column in columns.items():
            column.append(collected(name, metrics[name], self._method))
        self._calls += 1
        self._hosted = None

    def per_call(self) -> list[dict[str, Any]]:
        """The metrics of each call, as callbacks get them.

        The first call of this or `partials` waits for the accelerator. Raises TrialError if a
        metric's shape differs between calls.
        """
        columns = {name: list(column.values) for name, column in self._on_host().items()}
        return _by_call(columns, self._calls)

    def partials(self, with_values: bool = False) -> Partials:
        """Sums and extremes over this rank's calls.

        Raises TrialError if a metric's shape differs between calls.
        """
        columns = self._on_host()
        partials = Partials(
            calls=self._calls, metrics={name: _partial(each) for name, each in columns.items()}
        )
        if with_values:
            partials["values"] = {name: column.values for name, column in columns.items()}
        return partials

    def non_finite(self, first_batch: int, batches: int) -> dict[str, NonFinite]:
        """Where metrics were NaN or infinite. All batches have equally many calls."""
        found = {}
        for name, column in self._on_host().items():
            calls = column.non_finite()
            if calls.any():
                finite = np.flatnonzero(~calls)
                since = int(finite[-1]) + 1 if finite.size else 0
                first, last = (
                    first_batch + call * batches // len(calls)
                    for call in (int(calls.argmax()), since)
                )
                found[name] = NonFinite(first, last if since < len(calls) else None)
        return found

    def _checked(
        self, outcome: torch.Tensor | Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, list[Collected]]]:
        """The metrics of one call, and the columns to append them to."""
        if isinstance(outcome, torch.Tensor):
            outcome = {"loss": outcome}
        if not isinstance(outcome, (dict, Mapping)):  # most are dicts, which is checked fast
            raise TrialTypeError(
                f"{self._method} must return a dictionary mapping string names to metrics, or the "
                f"loss as a tensor; it returned a value {type_of(outcome)}"
            )
        if self._columns is None or outcome.keys() != self._columns.keys():
            self._check_names(outcome)
        if self._columns is None:
            self._columns = {name: [] for name in outcome}
        return outcome, self._columns

    def _check_names(self, outcome: Mapping[str, Any]) -> None:
        invalid = [name for name in outcome if not isinstance(name, str)]
        if invalid:
            raise TrialError(
                f"the names of metrics must be strings, but {self._method} returned a metric named "
                f"{invalid[0]!r} ({type_of(invalid[0])})"
            )
        if self._columns is not None:
            raise TrialValueError(
                f"metric names must match across all batches of data, but {self._method} returned "
                f"{_difference(outcome, self._columns)} in call {self._calls} of the workload, "
                "compared with its first call"
            )

    def _on_host(self) -> dict[str, HostColumn]:
        if self._hosted is None:
            self._hosted = to_host(self._columns or {}, self._method)
        return self._hosted


def combine(
    partials: Sequence[Partials], reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG
) -> dict[str, Any]:
    """Reduce each metric over all batches of all ranks, for callbacks. Pure: equal on every rank.

    Ranks without batches do not count. Raises TrialError if a metric's name or shape differs
    between ranks, or `reducers` do not match, or a sum of integers does not fit into 64 bits.
    """
    by_rank = {rank: part for rank, part in enumerate(partials) if part.get("calls")}
    if not by_rank:
        return {}
    first, reference = next(iter(by_rank.items()))
    for rank, part in by_rank.items():
        if part["metrics"].keys() != reference["metrics"].keys():
            raise TrialError(
                "metric names must match across ranks, but rank "
                f"{rank} returned {_difference(part['metrics'], reference['metrics'])}, compared "
                f"with rank {first}"
            )
    reducer_of = _reducer_of_each(reducers, reference["metrics"])
    return {name: _combine_one(name, by_rank, reducer) for name, reducer in reducer_of.items()}


def calls_over_ranks(partials: Sequence[Partials]) -> list[dict[str, Any]]:
    """The metrics of each call, averaged over ranks, of partials that `combine` has accepted. Pure.

    All ranks that report metrics have equally many calls.
    """
    reporting = [part for part in partials if part.get("calls")]
    if not reporting:
        return []
    columns = {
        name: mean_over_ranks([part["values"][name] for part in reporting])
        for name in reporting[0]["values"]
    }
    return _by_call(columns, reporting[0]["calls"])


def _by_call(columns: Mapping[str, list[Any]], calls: int) -> list[dict[str, Any]]:
    return [{name: values[call] for name, values in columns.items()} for call in range(calls)]


def _partial(column: HostColumn) -> Partial:
    numbers = column.numbers
    if numbers is not None:
        return Partial(
            count=len(numbers),
            sum=as_plain(sum_of(numbers)),
            max=as_plain(numbers.max(axis=0)),
            min=as_plain(numbers.min(axis=0)),
        )
    present = [value for value in column.values if value is not None]
    return Partial(unreduced=present[-1]) if present else Partial(count=0)


def _combine_one(name: str, by_rank: Mapping[int, Partials], reducer: Reducer) -> Any:
    of_ranks = {rank: part["metrics"][name] for rank, part in by_rank.items()}
    for metric in of_ranks.values():
        if "unreduced" in metric:
            return metric["unreduced"]
    numbers = {rank: metric for rank, metric in of_ranks.items() if metric["count"]}
    if not numbers:
        return None
    shapes = {rank: np.shape(metric["sum"]) for rank, metric in numbers.items()}
    if len(set(shapes.values())) > 1:
        raise TrialError(f'metric "{name}" differs in shape between ranks: {shapes}')
    if reducer is Reducer.MAX:
        return _result(_over_ranks(numbers, "max").max(axis=0))
    if reducer is Reducer.MIN:
        return _result(_over_ranks(numbers, "min").min(axis=0))
    total = sum_of(_over_ranks(numbers, "sum"))
    if reducer is Reducer.SUM:
        check_integers(total, f'the sum of metric "{name}" over all batches')
        return _result(total)
    return _result(total / sum(metric["count"] for metric in numbers.values()))


def _result(reduced: Any) -> Any:
    """A number if there is a single one, else an array. Determined made one number of any array."""
    array = np.asarray(reduced)
    return array.reshape(())[()] if array.size == 1 else array


def _over_ranks(metrics: Mapping[int, Partial], key: Literal["sum", "max", "min"]) -> Array:
    arrays = [numeric(metric[key]) for metric in metrics.values()]
    return stack([array for array in arrays if array is not None])


def _reducer_of_each(
    reducers: Reducer | Mapping[str, Reducer], metrics: Mapping[str, Partial]
) -> dict[str, Reducer]:
    if not isinstance(reducers, Mapping):
        reducers = dict.fromkeys(metrics, reducers)
    if reducers.keys() != metrics.keys():
        raise TrialError(
            "evaluation_reducer must give a single reducer, or a reducer for every validation "
            f"metric: expected {sorted(metrics)}, got {sorted(reducers)}"
        )
    for name, reducer in reducers.items():
        if not isinstance(reducer, Reducer):
            raise TrialError(
                f"evaluation_reducer gives {reducer!r} ({type_of(reducer)}) for metric "
                f'"{name}"; it must be a trial_core.pytorch.Reducer, such as Reducer.AVG'
            )
    # In the order of the metrics, so that all results have one order.
    return {name: reducers[name] for name in metrics}


def _difference(names: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    missing = sorted(expected.keys() - names.keys())
    extra = sorted(names.keys() - expected.keys())
    parts = [f"no {missing}"] if missing else []
    return " and ".join([*parts, f"also {extra}"] if extra else parts)
