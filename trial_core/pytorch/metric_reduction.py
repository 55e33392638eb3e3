"""Reduces metrics over all batches of all ranks, exactly once.

Each rank collects the metrics of its batches on the device, without waiting for it
(`BatchMetrics`). When the workload ends, they are moved to the host and ranks exchange sums and
extremes (`Partials`). `combine` then reduces each metric, by default to the mean over all batches
of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import torch

from trial_core.errors import TrialError
from trial_core.pytorch.metric_values import Array, Value, as_array, as_plain, to_host, type_of


class Reducer(Enum):
    """How to reduce a metric's values of single batches to one value.

    Follows ``determined.pytorch.Reducer``.

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


class Partial(TypedDict):
    """One metric of one rank, reduced over the rank's batches."""

    sum: Value
    max: Value
    min: Value


class Partials(TypedDict, total=False):
    """One rank's metrics of a workload; empty on a rank that reports none."""

    batches: int
    metrics: dict[str, Partial]


class BatchMetrics:
    """Collects one rank's metrics over a workload, without waiting for the accelerator.

    Args:
        method: the method that returns the metrics, for messages.
    """

    def __init__(self, method: str = "train_batch") -> None:
        self._method = method
        # Each metric's values, one for each call; None before the first call.
        self._columns: dict[str, list[torch.Tensor | Array]] | None = None
        self._calls_of_batch: list[int] = []
        self._of_batches: dict[str, Array] | None = None

    def add_batch(self, calls: Sequence[torch.Tensor | Mapping[str, Any]]) -> None:
        """Add one batch.

        Tensors are copied on their device, because the trial may reuse them.

        Args:
            calls: the return value of each call of the method, usually one. A tensor is the metric
                ``loss``.

        Raises:
            TrialError: a return value is neither a tensor nor a mapping, or a metric is not
                numeric, or the metrics are not those of the first batch.
        """
        for outcome in calls:
            metrics, columns = self._checked(outcome)
            for name, column in columns.items():
                column.append(self._copied(name, metrics[name]))
        self._calls_of_batch.append(len(calls))
        self._of_batches = None

    def per_batch(self) -> list[dict[str, Value]]:
        """The metrics of each batch: the mean over its calls.

        The first call of this or `partials` waits for the accelerator.

        Raises:
            TrialError: a metric's shape differs between batches.
        """
        values = {name: array.tolist() for name, array in self._on_host().items()}
        return [
            {name: batches[index] for name, batches in values.items()}
            for index in range(len(self._calls_of_batch))
        ]

    def partials(self) -> Partials:
        """Sums and extremes over this rank's batches.

        Raises:
            TrialError: a metric's shape differs between batches.
        """
        metrics = {
            name: Partial(
                sum=as_plain(values.sum(axis=0)),
                max=as_plain(values.max(axis=0)),
                min=as_plain(values.min(axis=0)),
            )
            for name, values in self._on_host().items()
        }
        return Partials(batches=len(self._calls_of_batch), metrics=metrics)

    def _checked(
        self, outcome: torch.Tensor | Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, list[torch.Tensor | Array]]]:
        """The metrics of one call, and the columns to append them to."""
        if isinstance(outcome, torch.Tensor):
            outcome = {"loss": outcome}
        if not isinstance(outcome, Mapping):
            raise TrialError(
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
            raise TrialError(
                f"metric names must match across all batches of data, but {self._method} returned "
                f"{_difference(outcome, self._columns)} in batch {len(self._calls_of_batch)} of "
                "the workload, compared with its first batch"
            )

    def _copied(self, name: str, value: Any) -> torch.Tensor | Array:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            return value.detach().clone()
        return as_array(name, value, self._method)

    def _on_host(self) -> dict[str, Array]:
        """Each metric's values of all batches: shape (batches, *shape of the metric)."""
        if self._of_batches is None:
            calls = to_host(self._columns or {}, self._method)
            self._of_batches = {
                name: _means(values, self._calls_of_batch) for name, values in calls.items()
            }
        return self._of_batches


def combine(
    partials: Sequence[Partials], reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG
) -> dict[str, Value]:
    """Reduce each metric over all batches of all ranks. Pure: the same result on every rank.

    Args:
        partials: each rank's metrics, in the order of ranks. Ranks without batches do not count.
        reducers: one reducer for all metrics, or one for each.

    Raises:
        TrialError: a metric's name or shape differs between ranks, or `reducers` do not match.
    """
    by_rank = {rank: part for rank, part in enumerate(partials) if part.get("batches")}
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


def _means(values: Array, calls_of_batch: Sequence[int]) -> Array:
    """One value for each batch: the mean over its calls."""
    if len(values) == len(calls_of_batch):
        return values
    ends = itertools.accumulate(calls_of_batch)
    return np.stack(
        [
            values[end - calls : end].mean(axis=0)
            for calls, end in zip(calls_of_batch, ends, strict=True)
        ]
    )


def _combine_one(name: str, by_rank: Mapping[int, Partials], reducer: Reducer) -> Value:
    shapes = {rank: np.shape(part["metrics"][name]["sum"]) for rank, part in by_rank.items()}
    if len(set(shapes.values())) > 1:
        raise TrialError(f'metric "{name}" differs in shape between ranks: {shapes}')
    metrics = [part["metrics"][name] for part in by_rank.values()]
    if reducer is Reducer.MAX:
        return as_plain(np.max([metric["max"] for metric in metrics], axis=0))
    if reducer is Reducer.MIN:
        return as_plain(np.min([metric["min"] for metric in metrics], axis=0))
    total = np.sum([metric["sum"] for metric in metrics], axis=0)
    if reducer is Reducer.SUM:
        return as_plain(total)
    return as_plain(np.asarray(total / sum(part["batches"] for part in by_rank.values())))


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
