"""Custom reducers: metrics that are computed from the values of all ranks, not averaged.

Follows ``determined.pytorch.MetricReducer`` and ``context.wrap_reducer``.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trial_core.errors import TrialError, TrialflowError, TrialTypeError, TrialValueError
from trial_core.messages import MetricsKind
from trial_core.rank.trial.metric_values import for_callbacks


class MetricReducer(ABC):
    """A metric that is computed over all ranks. Follows Determined's class.

    1. During a workload every rank collects values, usually in an ``update`` method that the trial
       calls in `train_batch` or `evaluate_batch`.
    2. When the workload ends, `per_slot_reduce` reduces this rank's values.
    3. `cross_slot_reduce` computes the metric from the results of all ranks.

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
        """Discard all values. Called on every rank before each workload that uses the metric."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """This rank's contribution, picklable. Called on every rank after such a workload."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """The metric. Called on every rank; must return the same on every rank.

        Args:
            per_slot_metrics: the results of `per_slot_reduce`, in the order of ranks, of the ranks
                that report metrics: all ranks, unless a `ModelParallelUnit` says otherwise. With
                several ranks, their tensors are on the CPU.

        Returns:
            If the reducer was wrapped with a name: a number, text, None, or an array or list of
            these. If it was wrapped without: a dict of such values by name.
        """


class FunctionReducer(MetricReducer):
    """A metric that a function computes from all values of all ranks. Keeps all values in memory.

    Args:
        function: takes the flat list of all values passed to `update`; the ranks' values alternate.
            With one `update` a batch this is the order of the unsharded data.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add one value of any picklable type, on the host (CPU)."""
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


@dataclass(frozen=True)
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool

    def serves(self, kind: MetricsKind) -> bool:
        return self.for_training if kind == "training" else self.for_validation

    @property
    def label(self) -> str:
        reducer = self.reducer
        if isinstance(reducer, FunctionReducer):
            function = reducer.function
            return f"reducer function {getattr(function, '__name__', repr(function))}()"
        return f"MetricReducer {type(reducer).__name__}"

    @contextmanager
    def naming(
        self, step: str, kind: MetricsKind, values: list[Any] | None = None
    ) -> Iterator[None]:
        """Have an error of the user's code in the block say which reducer it comes from.

        Args:
            step: the method that the block calls.
            values: what the ranks have contributed, if the block reduces it.

        Raises TrialError if the block has raised an error that is not ours.
        """
        try:
            yield
        except TrialflowError:
            raise
        except Exception as error:
            has_values = isinstance(self.reducer, FunctionReducer) and any(values or ())
            advice = ""
            if kind == "training" and self.for_validation and not has_values:
                advice = "; if train_batch does not update it, wrap it with for_training=False"
            raise TrialError(
                f"{self.label} (name={self.name!r}) raised {type(error).__name__} in {step}, for "
                f"{kind} metrics: {error}{advice}"
            ) from error


class ReducerRegistry:
    """The reducers that a trial has wrapped, in the order of wrapping."""

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer; see `TorchTrialContext.wrap_reducer`."""
        # A function may be wrapped twice: its values are in the FunctionReducer.
        if any(reducer is wrapped.reducer for wrapped in self._wrapped):
            raise TrialValueError(
                f"{_name_of(reducer)} was passed to wrap_reducer twice; wrap each reducer once, "
                "and choose the workloads with for_training and for_validation"
            )
        checked = _as_reducer(reducer)
        if name is not None and not isinstance(name, str):
            raise TrialTypeError(f"wrap_reducer's name must be a string or None, got {name!r}")
        wrapped = _Wrapped(checked, name, for_training, for_validation)
        if not for_training and not for_validation:
            raise TrialError(
                f"{wrapped.label} was wrapped with for_training=False and for_validation=False, so "
                "it would never be computed; leave one of them True"
            )
        self._wrapped.append(wrapped)
        return wrapped.reducer

    def reset(self, kind: MetricsKind) -> None:
        """Reset the reducers for workloads of this kind. Called before each one, on every rank."""
        for wrapped in self._wrapped:
            if wrapped.serves(kind):
                with wrapped.naming("reset", kind):
                    wrapped.reducer.reset()

    def names(self, kind: MetricsKind) -> list[str] | None:
        """Metric names for this kind of workload; None if a reducer was wrapped without a name."""
        names = [wrapped.name for wrapped in self._wrapped if wrapped.serves(kind)]
        known = [name for name in names if name is not None]
        return known if len(known) == len(names) else None

    def contribution(self, kind: MetricsKind) -> list[Any]:
        """A copy of the present values of this rank's reducers, for `reduce`."""
        return [copy.deepcopy(value) for value in self._per_slot(kind)]

    def _per_slot(self, kind: MetricsKind) -> Iterator[Any]:
        for wrapped in self._wrapped:
            if wrapped.serves(kind):
                with wrapped.naming("per_slot_reduce", kind):
                    value = wrapped.reducer.per_slot_reduce()
                yield value

    def reduce(
        self,
        kind: MetricsKind,
        allgather: Callable[[Any], list[Any]],
        *,
        counts: bool = True,
        contribution: list[Any] | None = None,
    ) -> dict[str, Any]:
        """The metrics of a workload, as callbacks get them. Collective: every rank calls this.

        Args:
            allgather: returns the arguments of all ranks, in the order of ranks. Called once, or
                not at all if no reducer is used in such workloads.
            counts: True if this rank's values count.
            contribution: an earlier result of `contribution`; None for the present values.

        Raises TrialError if ranks have wrapped different reducers, or a reducer raises, or its
        result does not match its wrapping, or two return a metric of the same name.
        """
        serving = [wrapped for wrapped in self._wrapped if wrapped.serves(kind)]
        if not serving:
            return {}
        labels = [f"{wrapped.label} (name={wrapped.name!r})" for wrapped in serving]
        values = list(self._per_slot(kind)) if contribution is None else contribution
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
            with wrapped.naming("cross_slot_reduce", kind, per_slot):
                reduced = wrapped.reducer.cross_slot_reduce(per_slot)
            result = _named(wrapped, reduced)
            duplicates = sorted(result.keys() & metrics.keys())
            if duplicates:
                raise TrialError(
                    f"{wrapped.label} gives the metric(s) {duplicates}, which another reducer "
                    "gives already; use different names"
                )
            metrics.update(result)
        return metrics


def _as_reducer(reducer: MetricReducer | Callable[[list[Any]], Any]) -> MetricReducer:
    if isinstance(reducer, MetricReducer):
        return reducer
    if isinstance(reducer, type) and issubclass(reducer, MetricReducer):
        raise TrialTypeError(
            f"wrap_reducer got the class {reducer.__name__}; pass an instance: "
            f"wrap_reducer({reducer.__name__}(), ...)"
        )
    if not callable(reducer):
        raise TrialTypeError(
            f"wrap_reducer got {_name_of(reducer)}; a reducer is a function, or an instance of a "
            "subclass of trial_core.pytorch.MetricReducer"
        )
    return FunctionReducer(reducer)


def _named(wrapped: _Wrapped, reduced: Any) -> dict[str, Any]:
    """A reducer's result as metrics by name, checked against its wrapping."""
    if wrapped.name is not None:
        if isinstance(reduced, Mapping):
            raise TrialTypeError(
                f'the {wrapped.label} was wrapped with name="{wrapped.name}" but returned a dict '
                f"(of {sorted(map(str, reduced))}); wrap it without a name if it "
                "returns several metrics, or return a single metric"
            )
        reduced = {wrapped.name: reduced}
    elif not isinstance(reduced, Mapping):
        raise TrialTypeError(
            f"the {wrapped.label} was wrapped without a name but did not return a dict (it "
            f"returned {_name_of(reduced)}); wrap it with a name if it returns a single metric, or "
            "return a dict of metrics by name"
        )
    invalid = [key for key in reduced if not isinstance(key, str)]
    if invalid:
        raise TrialError(
            f"the {wrapped.label} returned a dict with the key {invalid[0]!r}; the names of "
            "metrics must be strings"
        )
    return {key: for_callbacks(key, value, wrapped.label) for key, value in reduced.items()}


def _name_of(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
