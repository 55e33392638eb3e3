"""Metrics of many batches on many ranks made into one, exactly once.

Each rank collects what its `train_batch` or `evaluate_batch` returns (`BatchMetrics`), on the
device and without waiting for it. At the workload's end everything comes to the host in one go,
ranks exchange sums and extremes (`Partials`), and `combine` makes one value of each metric: by
default the mean of the per-batch values over all batches of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import torch

from trial_core.errors import TrialError
from trial_core.pytorch.metric_values import Array, Value, numbers, plain, to_host, type_of

__all__ = ["BatchMetrics", "Partial", "Partials", "Reducer", "Value", "combine", "numbers", "plain"]


class Reducer(Enum):
    """How a metric's values for single batches become one value.

    Attributes:
        AVG: their mean.
        SUM: their sum.
        MAX: the largest.
        MIN: the smallest.
    """

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


class Partial(TypedDict):
    """One metric's part of one rank. Plain data."""

    sum: Value
    max: Value
    min: Value


class Partials(TypedDict, total=False):
    """What one rank contributes to the metrics of a workload. Plain data; may be empty."""

    batches: int
    metrics: dict[str, Partial]


class BatchMetrics:
    """Collects one rank's metrics over a workload, without waiting for the accelerator.

    Args:
        method: the method that returns the metrics, for messages.
    """

    def __init__(self, method: str = "train_batch") -> None:
        self._method = method
        # Each metric's values, one for each call; None before the first call says which there are.
        self._columns: dict[str, list[torch.Tensor | Array]] | None = None
        self._calls_of_batch: list[int] = []
        self._of_batches: dict[str, Array] | None = None

    def add_batch(self, calls: Sequence[torch.Tensor | Mapping[str, Any]]) -> None:
        """Add one batch: what each call of the method returned, usually a single one.

        A tensor on its own is the metric ``loss``. Tensors are copied on their device, since the
        trial may reuse them.

        Raises:
            TrialError: neither a tensor nor a mapping; a metric that is no number and no array of
                numbers; other metrics than in the first batch.
        """
        for outcome in calls:
            metrics, columns = self._checked(outcome)
            for name, column in columns.items():
                column.append(self._kept(name, metrics[name]))
        self._calls_of_batch.append(len(calls))
        self._of_batches = None

    def per_batch(self) -> list[dict[str, Value]]:
        """The metrics of each batch; the mean over its calls if there were several.

        The first of this and `partials` waits for the accelerator, once.

        Raises:
            TrialError: a metric whose shape differs between batches.
        """
        values = {name: array.tolist() for name, array in self._on_host().items()}
        return [
            {name: batches[index] for name, batches in values.items()}
            for index in range(len(self._calls_of_batch))
        ]

    def partials(self) -> Partials:
        """Sums and extremes over this rank's batches.

        Raises:
            TrialError: a metric whose shape differs between batches.
        """
        metrics = {
            name: Partial(
                sum=plain(values.sum(axis=0)),
                max=plain(values.max(axis=0)),
                min=plain(values.min(axis=0)),
            )
            for name, values in self._on_host().items()
        }
        return Partials(batches=len(self._calls_of_batch), metrics=metrics)

    def _checked(
        self, outcome: torch.Tensor | Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, list[torch.Tensor | Array]]]:
        """What a call returned, as metrics, and the columns that they belong to."""
        if isinstance(outcome, torch.Tensor):
            outcome = {"loss": outcome}
        if not isinstance(outcome, Mapping):
            raise TrialError(
                f"{self._method} must return a dictionary mapping string names to metrics, or a "
                f"tensor, which is then the loss; it returned {type_of(outcome)}"
            )
        if self._columns is None or outcome.keys() != self._columns.keys():
            self._check_names(outcome)
        if self._columns is None:
            self._columns = {name: [] for name in outcome}
        return outcome, self._columns

    def _check_names(self, outcome: Mapping[str, Any]) -> None:
        odd = [name for name in outcome if not isinstance(name, str)]
        if odd:
            raise TrialError(
                f"the names of metrics must be strings, but {self._method} returned a metric named "
                f"{odd[0]!r} ({type_of(odd[0])})"
            )
        if self._columns is not None:
            raise TrialError(
                f"metric names must match across all batches of data, but {self._method} returned "
                f"{_difference(outcome, self._columns)} in batch {len(self._calls_of_batch)} of "
                "the workload, compared with its first batch"
            )

    def _kept(self, name: str, value: Any) -> torch.Tensor | Array:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            return value.detach().clone()
        return numbers(name, value, self._method)

    def _on_host(self) -> dict[str, Array]:
        """Each metric's values of all batches: arrays of shape (batches, *the metric's own)."""
        if self._of_batches is None:
            calls = to_host(self._columns or {}, self._method)
            self._of_batches = {
                name: _means(values, self._calls_of_batch) for name, values in calls.items()
            }
        return self._of_batches


def combine(
    partials: Sequence[Partials], reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG
) -> dict[str, Value]:
    """Reduce each metric over all batches of all ranks. Pure: same input, same result everywhere.

    Args:
        partials: what each rank contributes, in the order of ranks. Ranks without a batch (empty,
            or with no batches) do not count.
        reducers: how to reduce: one way for all metrics, or one for each.

    Raises:
        TrialError: ranks disagree on a metric's name or shape, or `reducers` do not fit.
    """
    parts = {rank: part for rank, part in enumerate(partials) if part.get("batches")}
    if not parts:
        return {}
    first, reference = next(iter(parts.items()))
    for rank, part in parts.items():
        if part["metrics"].keys() != reference["metrics"].keys():
            raise TrialError(
                "metric names must match across ranks, but rank "
                f"{rank} returned {_difference(part['metrics'], reference['metrics'])}, compared "
                f"with rank {first}"
            )
    ways = _reducer_of_each(reducers, reference["metrics"])
    return {name: _combine_one(name, parts, way) for name, way in ways.items()}


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


def _combine_one(name: str, parts: Mapping[int, Partials], way: Reducer) -> Value:
    shapes = {rank: np.shape(part["metrics"][name]["sum"]) for rank, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise TrialError(f'metric "{name}" differs in shape between ranks: {shapes}')
    metrics = [part["metrics"][name] for part in parts.values()]
    if way is Reducer.MAX:
        return plain(np.max([metric["max"] for metric in metrics], axis=0))
    if way is Reducer.MIN:
        return plain(np.min([metric["min"] for metric in metrics], axis=0))
    total = np.sum([metric["sum"] for metric in metrics], axis=0)
    if way is Reducer.SUM:
        return plain(total)
    return plain(np.asarray(total / sum(part["batches"] for part in parts.values())))


def _reducer_of_each(
    reducers: Reducer | Mapping[str, Reducer], metrics: Mapping[str, Partial]
) -> dict[str, Reducer]:
    ways = dict(reducers) if isinstance(reducers, Mapping) else dict.fromkeys(metrics, reducers)
    if ways.keys() != metrics.keys():
        raise TrialError(
            "evaluation_reducer must give a single reducer, or a reducer for every validation "
            f"metric: expected {sorted(metrics)}, got {sorted(ways)}"
        )
    for name, way in ways.items():
        if not isinstance(way, Reducer):
            raise TrialError(
                f'evaluation_reducer gives {way!r} ({type_of(way)}) for metric "{name}"; it must '
                "be a trial_core.pytorch.Reducer, such as Reducer.AVG"
            )
    # In the order of the metrics, so that results are listed alike.
    return {name: ways[name] for name in metrics}


def _difference(names: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    missing = sorted(expected.keys() - names.keys())
    extra = sorted(names.keys() - expected.keys())
    parts = [f"no {missing}"] if missing else []
    return " and ".join([*parts, f"also {extra}"] if extra else parts)
