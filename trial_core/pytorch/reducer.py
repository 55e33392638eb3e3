"""Custom metrics: computed from what all ranks have gathered, not averaged over ranks.

Follows ``determined.pytorch.MetricReducer`` and ``context.wrap_reducer``.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from trial_core.errors import TrialError
from trial_core.pytorch.metrics import BatchMetrics, Reducer, combine, numbers, plain
from trial_core.run.observer import MetricsKind

__all__ = [
    "BatchMetrics",
    "FunctionReducer",
    "MetricReducer",
    "Reducer",
    "ReducerRegistry",
    "combine",
]


class MetricReducer(ABC):
    """A metric that is computed over all ranks, in three steps of your own.

    1. During a workload every rank gathers values; how is up to you, usually an ``update`` method
       that you call in `train_batch` or `evaluate_batch`.
    2. At its end `per_slot_reduce` boils this rank's values down to what the others need.
    3. `cross_slot_reduce` makes the metric of what all ranks gave.

    For example::

        class Mean(MetricReducer):
            def __init__(self):
                self.reset()

            def reset(self):
                self.sum, self.count = 0.0, 0

            def update(self, values):
                self.sum += sum(values)
                self.count += len(values)

            def per_slot_reduce(self):
                return self.sum, self.count

            def cross_slot_reduce(self, per_slot_metrics):
                sums, counts = zip(*per_slot_metrics)
                return sum(sums) / sum(counts)

        self.mean = context.wrap_reducer(Mean(), name="mean")    # in the trial's __init__
        self.mean.update(values)                                 # in train_batch
    """

    @abstractmethod
    def reset(self) -> None:
        """Forget all values. Called on every rank before each workload that uses the metric."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """This rank's contribution, picklable. Called on every rank after each such workload."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """The metric. Called on every rank, and must give the same on every rank.

        Args:
            per_slot_metrics: what `per_slot_reduce` returned, for each rank, in their order.

        Returns:
            A number, or an array or list of numbers, if the reducer was wrapped with a name;
            a dict of such by name, if it was wrapped without.
        """


class FunctionReducer(MetricReducer):
    """A metric that a function computes from all values of all ranks, kept in memory until then.

    Args:
        function: takes the flat list of all values passed to `update`. With one `update` per
            batch, in the order of the unsharded data: values of different ranks take turns.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Remember one value, of any picklable type. Call it with values on the host (CPU)."""
        self._values.append(value)

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        missing = object()
        turns = itertools.zip_longest(*per_slot_metrics, fillvalue=missing)
        flat = itertools.chain.from_iterable(turns)
        return self.function([value for value in flat if value is not missing])


ReducerT = TypeVar("ReducerT", bound=MetricReducer)


@dataclass(frozen=True)
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool

    def serves(self, kind: MetricsKind) -> bool:
        return self.for_training if kind == "training" else self.for_validation

    @property
    def words(self) -> str:
        """What the user knows this reducer as."""
        reducer = self.reducer
        if isinstance(reducer, FunctionReducer):
            function = reducer.function
            return f"reducer function {getattr(function, '__name__', repr(function))}()"
        return f"MetricReducer {type(reducer).__name__}"


class ReducerRegistry:
    """The reducers that a trial has wrapped, in the order of wrapping."""

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    @overload
    def wrap(
        self,
        reducer: ReducerT,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> ReducerT: ...

    @overload
    def wrap(
        self,
        reducer: Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> FunctionReducer: ...

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer. Every rank must wrap the same ones, in the same order.

        Args:
            reducer: a `MetricReducer`, or a function of the list of all values.
            name: the metric's name; None when the reducer returns a dict of metrics by name.
            for_training: report it with training workloads.
            for_validation: report it with validations.

        Returns:
            The `MetricReducer` itself; for a function, an object with ``update(value)``.

        Raises:
            TrialError: neither a function nor a `MetricReducer`, a `MetricReducer` that was wrapped
                before, or for nothing.
        """
        # A function may be: it has no values of its own, those are in what is returned each time.
        if any(reducer is wrapped.reducer for wrapped in self._wrapped):
            raise TrialError(
                f"{_name_of(reducer)} was passed to wrap_reducer twice; wrap each reducer once, "
                "with for_training and for_validation saying where it counts"
            )
        wrapped = _Wrapped(_as_reducer(reducer), _checked_name(name), for_training, for_validation)
        if not for_training and not for_validation:
            raise TrialError(
                f"{wrapped.words} was wrapped with for_training=False and for_validation=False, so "
                "it would never be computed; leave one of them True"
            )
        self._wrapped.append(wrapped)
        return wrapped.reducer

    def reset(self, *, for_training: bool = False, for_validation: bool = False) -> None:
        """Reset the reducers that count in such workloads. Before each workload, on every rank."""
        for wrapped in self._wrapped:
            if (for_training and wrapped.for_training) or (
                for_validation and wrapped.for_validation
            ):
                wrapped.reducer.reset()

    def contribution(self, kind: MetricsKind) -> list[Any]:
        """What this rank's reducers hold now, for `reduce`; a copy, whatever they hold later."""
        return [
            copy.deepcopy(wrapped.reducer.per_slot_reduce())
            for wrapped in self._wrapped
            if wrapped.serves(kind)
        ]

    def reduce(
        self,
        kind: MetricsKind,
        allgather: Callable[[Any], list[Any]],
        *,
        counts: bool = True,
        contribution: list[Any] | None = None,
    ) -> dict[str, Any]:
        """The metrics of a workload, as plain Python. Collective: every rank calls this.

        Args:
            allgather: gives what each rank passed to it, in the order of ranks. Called once if any
                reducer counts in such workloads, and not at all otherwise.
            counts: whether this rank's values do. `cross_slot_reduce` sees those of ranks that do.
            contribution: this rank's values, had earlier; None: what its reducers hold now.

        Raises:
            TrialError: ranks have wrapped different reducers, or a reducer returned something
                other than its wrapping promises.
        """
        serving = [wrapped for wrapped in self._wrapped if wrapped.serves(kind)]
        if not serving:
            return {}
        labels = [f"{wrapped.words} (name={wrapped.name!r})" for wrapped in serving]
        values = contribution
        if values is None:
            values = [wrapped.reducer.per_slot_reduce() for wrapped in serving]
        gathered = allgather((labels, values if counts else None))
        for rank, (other_labels, _) in enumerate(gathered):
            if other_labels != labels:
                raise TrialError(
                    "every rank must wrap the same reducers in the same order, but this one "
                    f"wrapped {labels} and rank {rank} wrapped {other_labels}"
                )
        metrics: dict[str, Any] = {}
        for index, wrapped in enumerate(serving):
            per_slot = [rank_values[index] for _, rank_values in gathered if rank_values]
            result = _named(wrapped, wrapped.reducer.cross_slot_reduce(per_slot))
            twice = sorted(result.keys() & metrics.keys())
            if twice:
                raise TrialError(
                    f"{wrapped.words} gives the metric(s) {twice}, which another reducer gives "
                    "already; give each metric a name of its own"
                )
            metrics.update(result)
        return metrics


def _as_reducer(reducer: MetricReducer | Callable[[list[Any]], Any]) -> MetricReducer:
    if isinstance(reducer, MetricReducer):
        return reducer
    if isinstance(reducer, type) and issubclass(reducer, MetricReducer):
        raise TrialError(
            f"wrap_reducer got the class {reducer.__name__}; pass an instance: "
            f"wrap_reducer({reducer.__name__}(), ...)"
        )
    if not callable(reducer):
        raise TrialError(
            f"wrap_reducer got {_name_of(reducer)}; a reducer is a function, or an instance of a "
            "subclass of trial_core.pytorch.MetricReducer"
        )
    return FunctionReducer(reducer)


def _checked_name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TrialError(f"wrap_reducer's name must be a string or None, got {name!r}")
    return name


def _named(wrapped: _Wrapped, reduced: Any) -> dict[str, Any]:
    """A reducer's result as metrics by name, checked against how it was wrapped."""
    if wrapped.name is not None:
        if isinstance(reduced, Mapping):
            raise TrialError(
                f'the {wrapped.words} was wrapped with name="{wrapped.name}" but returned a dict '
                f"(of {_names(reduced)}); wrap it without a name if it returns several metrics, or "
                "return a single metric"
            )
        reduced = {wrapped.name: reduced}
    elif not isinstance(reduced, Mapping):
        raise TrialError(
            f"the {wrapped.words} was wrapped without a name but did not return a dict (it "
            f"returned {_name_of(reduced)}); wrap it with a name if it returns a single metric, or "
            "return a dict of metrics by name"
        )
    odd = [key for key in reduced if not isinstance(key, str)]
    if odd:
        raise TrialError(
            f"the {wrapped.words} returned a dict with the key {odd[0]!r}; the names of metrics "
            "are strings"
        )
    return {key: plain(numbers(key, value, wrapped.words)) for key, value in reduced.items()}


def _names(mapping: Mapping[Any, Any]) -> Sequence[str]:
    return sorted(map(str, mapping))


def _name_of(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
