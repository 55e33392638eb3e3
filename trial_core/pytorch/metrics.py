"""Metrics of many batches on many ranks made into one, exactly once.

Each rank collects what its `train_batch` or `evaluate_batch` returns (`BatchMetrics`), on the
device and without waiting for it. At the workload's end everything comes to the host in one go,
ranks exchange sums and extremes (`Partials`), and `combine` makes one value of each metric: by
default the mean of the per-batch values over all batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import torch

from trial_core.errors import TrialError

# A metric's value: one number, or numbers in nested lists. Plain Python, so JSON takes it.
Value = float | int | list[Any]
Array = np.ndarray[Any, Any]


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
        self._names: Mapping[str, Any] | None = None
        self._on_device: list[dict[str, torch.Tensor | Array]] = []
        self._on_host: list[dict[str, Array]] = []
        self._calls_of_batch: list[int] = []

    def add_batch(self, calls: Sequence[torch.Tensor | Mapping[str, Any]]) -> None:
        """Add one batch: what each call of the method returned, usually a single one.

        A tensor on its own is the metric ``loss``. Tensors are copied on their device, since the
        trial may reuse them.

        Raises:
            TrialError: neither a tensor nor a mapping; a metric that is no number and no array of
                numbers; other metrics than in the first batch.
        """
        for outcome in calls:
            metrics = self._checked(outcome)
            self._on_device.append({name: self._kept(name, metrics[name]) for name in metrics})
        self._calls_of_batch.append(len(calls))

    def per_batch(self) -> list[dict[str, Value]]:
        """The metrics of each batch; the mean over its calls if there were several.

        Waits for the accelerator, once.

        Raises:
            TrialError: a metric whose shape differs between batches.
        """
        return [{name: plain(value) for name, value in batch.items()} for batch in self._batches()]

    def partials(self) -> Partials:
        """Sums and extremes over this rank's batches. Waits for the accelerator, once.

        Raises:
            TrialError: a metric whose shape differs between batches.
        """
        batches = self._batches()
        metrics: dict[str, Partial] = {}
        for name in batches[0] if batches else ():
            values = np.stack([batch[name] for batch in batches])
            metrics[name] = Partial(
                sum=plain(values.sum(axis=0)),
                max=plain(values.max(axis=0)),
                min=plain(values.min(axis=0)),
            )
        return Partials(batches=len(batches), metrics=metrics)

    def _checked(self, outcome: torch.Tensor | Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(outcome, torch.Tensor):
            outcome = {"loss": outcome}
        if not isinstance(outcome, Mapping):
            raise TrialError(
                f"{self._method} must return a dictionary mapping string names to metrics, or a "
                f"tensor, which is then the loss; it returned {_type_of(outcome)}"
            )
        odd = [name for name in outcome if not isinstance(name, str)]
        if odd:
            raise TrialError(
                f"the names of metrics must be strings, but {self._method} returned a metric named "
                f"{odd[0]!r} ({_type_of(odd[0])})"
            )
        if self._names is None:
            self._names = dict.fromkeys(outcome)
        if outcome.keys() != self._names.keys():
            raise TrialError(
                f"metric names must match across all batches of data, but {self._method} returned "
                f"{_difference(outcome, self._names)} in batch {len(self._calls_of_batch)} of "
                "the workload, compared with its first batch"
            )
        return outcome

    def _kept(self, name: str, value: Any) -> torch.Tensor | Array:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            return value.detach().clone()
        return numbers(name, value, self._method)

    def _batches(self) -> list[dict[str, Array]]:
        self._on_host += _to_host(self._on_device)
        self._on_device = []
        for index, call in enumerate(self._on_host):
            for name, value in call.items():
                expected = self._on_host[0][name].shape
                if value.shape != expected:
                    raise TrialError(
                        f'metric "{name}" has shape {value.shape} in call {index} of '
                        f"{self._method}, but {expected} in the first; return its mean over the "
                        "samples, or compute it in a reducer (context.wrap_reducer)"
                    )
        calls = iter(self._on_host)
        return [_mean_of_calls([next(calls) for _ in range(n)]) for n in self._calls_of_batch]


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


def numbers(name: str, value: Any, source: str) -> Array:
    """A metric's value as an array of float64 or int64, on the host.

    Args:
        source: what returned the value, for the message.

    Raises:
        TrialError: it is neither a number nor an array (or nested lists) of numbers.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return _host_array(value.detach())
    array = None
    nested = isinstance(value, (list, tuple)) and _holds_numbers(value)
    if nested or isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        array = np.asarray(value)
    if array is None or array.dtype.kind not in "fiub":
        raise TrialError(
            f'metric "{name}" returned by {source} is {_type_of(value)}; a metric is a number, or '
            "an array or list of numbers (equally long lists, if nested): a Python number, a torch "
            "tensor, a numpy array or scalar"
        )
    # A copy: the trial may go on writing to its array.
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def plain(value: Array) -> Value:
    """An array as plain Python: a number, or numbers in nested lists."""
    result: Value = value.tolist()
    return result


def _to_host(calls: list[dict[str, torch.Tensor | Array]]) -> list[dict[str, Array]]:
    """All values on the host: one transfer for each device, type and shape, usually one in all."""
    groups: dict[Any, list[tuple[int, str, torch.Tensor]]] = {}
    hosted: list[dict[str, Array]] = [dict.fromkeys(call, np.empty(0)) for call in calls]
    for index, call in enumerate(calls):
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                key = (value.device, value.dtype, value.shape)
                groups.setdefault(key, []).append((index, name, value))
            else:
                hosted[index][name] = value
    for group in groups.values():
        together = _host_array(torch.stack([value for _, _, value in group]))
        for (index, name, _), value in zip(group, together, strict=True):
            hosted[index][name] = np.asarray(value)
    return hosted


def _host_array(tensor: torch.Tensor) -> Array:
    # Widened on the host: not every accelerator has float64, and numpy has no bfloat16.
    array: Array = (
        tensor.cpu().to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()
    )
    return array


def _mean_of_calls(calls: list[dict[str, Array]]) -> dict[str, Array]:
    if len(calls) == 1:
        return calls[0]
    return {
        name: np.asarray(np.mean([call[name] for call in calls], axis=0))
        for name in (calls[0] if calls else ())
    }


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
                f'evaluation_reducer gives {way!r} ({_type_of(way)}) for metric "{name}"; it must '
                "be a trial_core.pytorch.Reducer, such as Reducer.AVG"
            )
    # In the order of the metrics, so that results are listed alike.
    return {name: ways[name] for name in metrics}


def _holds_numbers(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether nested lists hold only numbers, and as many at each place of a level."""
    if all(isinstance(item, (list, tuple)) for item in value):
        return len({len(item) for item in value}) <= 1 and all(map(_holds_numbers, value))
    return all(isinstance(item, (bool, int, float, np.generic)) for item in value)


def _difference(names: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    missing = sorted(expected.keys() - names.keys())
    extra = sorted(names.keys() - expected.keys())
    parts = [f"no {missing}"] if missing else []
    return " and ".join([*parts, f"also {extra}"] if extra else parts)


def _type_of(value: Any) -> str:
    kind = f"of type {type(value).__name__}"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{kind} with dtype {value.dtype}"
    return kind
