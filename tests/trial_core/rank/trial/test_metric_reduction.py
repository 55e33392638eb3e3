"""Metrics: collected without waiting for the device, and reduced over all ranks exactly once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.overrides import TorchFunctionMode

from trial_core.errors import TrialError
from trial_core.rank.trial import metric_values
from trial_core.rank.trial.metric_reduction import (
    BatchMetrics,
    Partials,
    Reducer,
    calls_over_ranks,
    combine,
)
from trial_core.rank.trial.metric_values import as_reported

floats = st.floats(-1e6, 1e6)


def rank_of(*batches: Any) -> Partials:
    metrics = BatchMetrics()
    for batch in batches:
        metrics.add_call(batch)
    return metrics.partials()


def reduced(*ranks: list[Any], reducers: Any = Reducer.AVG) -> dict[str, Any]:
    return as_reported(combine([rank_of(*batches) for batches in ranks], reducers), "train_batch")


def plain(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What callbacks get of each call, as plain Python."""
    return [
        {name: each.tolist() if hasattr(each, "tolist") else each for name, each in call.items()}
        for call in calls
    ]


class Recorder(TorchFunctionMode):
    """Records the names of all torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_ranks_are_averaged_once() -> None:
    """Ranks with 0 and 1 average to 0.5."""
    assert reduced([{"loss": 0.0}], [{"loss": 1.0}]) == {"loss": 0.5}


def test_ranks_are_weighted_by_their_batches() -> None:
    """A rank with three batches counts three times as much as one with one batch."""
    assert reduced([{"loss": 1.0}, {"loss": 2.0}, {"loss": 6.0}], [{"loss": 15.0}]) == {"loss": 6.0}


@settings(deadline=None)
@given(st.lists(st.lists(floats, max_size=4), min_size=1, max_size=5))
def test_any_division_among_ranks_gives_the_same(ranks: list[list[float]]) -> None:
    """The result depends only on the batches of all ranks together, for each reducer."""
    values = [value for rank in ranks for value in rank]
    batches = [
        [{"x": torch.tensor(value, dtype=torch.float64)} for value in rank] for rank in ranks
    ]
    results = {way: reduced(*batches, reducers=way) for way in Reducer}
    if not values:
        assert list(results.values()) == [{}] * 4
        return
    assert results[Reducer.AVG]["x"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert results[Reducer.SUM]["x"] == pytest.approx(sum(values), abs=1e-6)
    assert results[Reducer.MAX] == {"x": max(values)}
    assert results[Reducer.MIN] == {"x": min(values)}


def test_reducers_by_metric() -> None:
    """Each metric can have its own reducer."""
    ranks = [{"a": 1, "b": 1}, {"a": 5, "b": 5}], [{"a": 3, "b": 3}]
    result = reduced(*ranks, reducers={"b": Reducer.MAX, "a": Reducer.SUM})
    assert result == {"a": 9, "b": 5}


def test_ranks_without_metrics_do_not_count() -> None:
    """A rank that does not report metrics contributes nothing."""
    assert combine([Partials(), rank_of({"loss": 3.0}), rank_of()]) == {"loss": 3.0}


def test_arrays_are_reduced_elementwise() -> None:
    """Tensors, arrays and nested lists keep their shape."""
    ranks = [{"m": torch.tensor([[1.0, 2.0]])}], [{"m": np.array([[3.0, 6.0]])}, {"m": [[5, 1]]}]
    assert reduced(*ranks) == {"m": [[3.0, 3.0]]}
    assert reduced(*ranks, reducers=Reducer.MAX) == {"m": [[5.0, 6.0]]}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True,
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        np.array([2, 3], dtype=np.uint8),
        torch.tensor(2),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor([2.0, 3.0], requires_grad=True),
        torch.tensor(True),
        [1, 2.5],
        ((1, 2), (3, 4)),
    ],
    ids=repr,
)
def test_results_are_plain(value: Any) -> None:
    """Results and partials are plain Python for every type of number, so that JSON takes them."""
    metrics = BatchMetrics()
    metrics.add_call({"x": value})
    result = as_reported(combine([metrics.partials()]), "train_batch")
    expected = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value
    assert np.array_equal(np.asarray(result["x"]), np.asarray(expected, dtype=float))
    for each in (result, plain(metrics.per_call()), metrics.partials()):
        assert json.loads(json.dumps(each)) == each


@pytest.mark.parametrize(
    ("value", "of_call", "of_all"),
    [
        (torch.tensor([0.5]), np.array([0.5]), np.float64(0.5)),
        (np.array([[3]]), np.array([[3]]), np.float64(3)),
        (torch.tensor(0.5), np.float64(0.5), np.float64(0.5)),
        (2, np.int64(2), np.float64(2)),
        (torch.tensor([1, 2]), np.array([1, 2]), np.array([1.0, 2.0])),
    ],
    ids=repr,
)
def test_callbacks_get_numbers_and_arrays_of_numpy(value: Any, of_call: Any, of_all: Any) -> None:
    """Of each call as the trial has returned them; reduced, an array of one element is a number.

    They compare with numbers: ``metrics["accuracy"] > best``.
    """
    metrics = BatchMetrics()
    metrics.add_call({"x": value, "y": None})
    metrics.add_call({"x": value, "y": 1.0})
    partials = [metrics.partials(with_values=True)] * 2
    result = combine(partials)["x"]
    assert type(result) is type(of_all)
    assert np.array_equal(result, of_all)
    for calls in (metrics.per_call(), calls_over_ranks(partials)):
        assert isinstance(calls[0]["x"], (np.ndarray, np.generic))
        assert np.shape(calls[0]["x"]) == np.shape(of_call)
        assert np.array_equal(calls[0]["x"], of_call)
        assert calls[0]["y"] is None
        assert isinstance(calls[1]["y"], np.float64)
    assert np.all(result > 0.25)


def test_a_reported_metric_of_one_element_is_a_number() -> None:
    """For everything that reads reported metrics, the searcher metric among them."""
    given = {"loss": [[0.25]], "other": np.array([2]), "parts": [0.5, 1.5], "text": ["a"]}
    reported = as_reported(given, "a hook")
    assert reported == {"loss": 0.25, "other": 2, "parts": [0.5, 1.5], "text": ["a"]}
    assert [type(each) for each in reported.values()] == [float, int, list, list]


def test_collecting_never_waits() -> None:
    """Adding a batch copies on the device; one transfer moves all values to the host."""
    metrics = BatchMetrics()
    losses = [torch.tensor(value, requires_grad=True) * 2 for value in (1.0, 2.0, 3.0)]
    with Recorder() as adding:
        for loss in losses:
            metrics.add_call({"loss": loss, "twin": loss})
    assert set(adding.names) == {"is_complex", "detach", "clone"}
    with Recorder() as ending:
        assert plain(metrics.per_call()) == [{"loss": v, "twin": v} for v in (2.0, 4.0, 6.0)]
        assert metrics.partials()["calls"] == 3
    assert [ending.names.count(name) for name in ("cpu", "item", "tolist")] == [1, 0, 0]


def test_values_are_copied() -> None:
    """A trial may reuse the tensor or array that it returned."""
    tensor, array = torch.zeros(1), np.zeros(1)
    metrics = BatchMetrics()
    for _ in range(2):
        metrics.add_call({"t": tensor, "a": array})
        tensor += 1
        array += 1
    assert plain(metrics.per_call()) == [{"t": [0.0], "a": [0.0]}, {"t": [1.0], "a": [1.0]}]


def test_autograd_graphs_are_released() -> None:
    """The copy of a loss is detached."""
    metrics = BatchMetrics()
    metrics.add_call(torch.ones(1, requires_grad=True) * 2)
    assert metrics._columns["loss"][0].requires_grad is False  # type: ignore[index,union-attr]


def test_every_call_of_a_batch_counts() -> None:
    """A batch of several micro-batches has their metrics one by one."""
    metrics = BatchMetrics()
    for value in (1.0, 2.0, 4.0, 9.0):
        metrics.add_call(torch.tensor(value))
    assert plain(metrics.per_call()) == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 4.0}, {"loss": 9.0}]
    assert metrics.partials()["calls"] == 4
    assert combine([metrics.partials()]) == {"loss": 4.0}


def test_the_metrics_of_each_call_are_averaged_over_ranks() -> None:
    """Only over ranks that report metrics; every rank gets the same from the same partials."""
    ranks = []
    for offset in (0.0, 3.0):
        metrics = BatchMetrics()
        for call in range(3):
            metrics.add_call({"loss": torch.tensor(call + offset), "m": [call, 2 * offset]})
        ranks.append(metrics.partials(with_values=True))
    assert plain(calls_over_ranks([Partials(), *ranks])) == [
        {"loss": 1.5 + call, "m": [call, 3.0]} for call in range(3)
    ]
    assert calls_over_ranks([Partials(), Partials()]) == []


OTHER_VALUES = [
    ("high", "high"),
    ({"a": 1, "b": [torch.tensor(0.5), None]}, {"a": 1, "b": [0.5, None]}),
    ({3: {"c": np.float32(0.5)}}, {"3": {"c": 0.5}}),
    ([torch.tensor(1.5), np.array([2, 3])], [1.5, [2, 3]]),
    ([np.zeros(2), np.zeros(2)], [[0.0, 0.0], [0.0, 0.0]]),
    ([[1], [2, 3]], [[1], [2, 3]]),
    ([1, None], [1, None]),
    ([], []),
]


@pytest.mark.parametrize(("value", "given"), OTHER_VALUES, ids=repr)
def test_other_values_are_reported_and_not_reduced(value: Any, given: Any) -> None:
    """The last one of the first rank, beside a loss that is averaged; and each call's."""
    ranks = []
    for rank in (0, 1):
        metrics = BatchMetrics()
        metrics.add_call({"loss": 1.0 + rank, "odd": "first"})
        metrics.add_call({"loss": 3.0 + rank, "odd": value if rank == 0 else "other"})
        ranks.append(metrics.partials(with_values=True))
        assert plain(metrics.per_call())[0] == {"loss": 1.0 + rank, "odd": "first"}
    result = as_reported(combine(ranks), "train_batch")
    assert result == {"loss": 2.5, "odd": given}
    assert json.loads(json.dumps(result)) == result
    assert plain(calls_over_ranks(ranks)) == [
        {"loss": 1.5, "odd": "first"}, {"loss": 3.5, "odd": given}
    ]  # fmt: skip


@pytest.mark.parametrize("reducer", list(Reducer))
def test_none_does_not_count(reducer: Reducer) -> None:
    """The other batches are reduced. A metric that is always None stays None."""
    ranks = (
        [{"x": torch.tensor(2.0), "y": None}, {"x": None, "y": None}],
        [{"x": None, "y": None}, {"x": None, "y": None}],
        [{"x": 4.0, "y": None}, {"x": 9.0, "y": None}],
    )
    expected = {Reducer.AVG: 5.0, Reducer.SUM: 15.0, Reducer.MAX: 9.0, Reducer.MIN: 2.0}
    assert reduced(*ranks, reducers=reducer) == {"x": expected[reducer], "y": None}
    partials = []
    for batches in ranks:
        metrics = BatchMetrics()
        for batch in batches:
            metrics.add_call(batch)
        partials.append(metrics.partials(with_values=True))
    assert plain(calls_over_ranks(partials)) == [{"x": 3.0, "y": None}, {"x": 9.0, "y": None}]


def test_a_dict_of_tensors_is_copied_and_does_not_wait() -> None:
    """A trial may reuse them."""
    tensor, metrics = torch.zeros(2), BatchMetrics()
    with Recorder() as adding:
        metrics.add_call({"parts": {"a": tensor, "b": [tensor]}})
    assert set(adding.names) == {"is_complex", "detach", "clone"}
    tensor += 1
    assert plain(metrics.per_call()) == [{"parts": {"a": [0.0, 0.0], "b": [[0.0, 0.0]]}}]


def test_partials_can_be_read_between_batches() -> None:
    """Reading them does not change later results."""
    metrics = BatchMetrics()
    metrics.add_call({"x": torch.tensor(1)})
    metrics.partials()
    metrics.add_call({"x": torch.tensor(2)})
    assert plain(metrics.per_call()) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("reducer", list(Reducer))
def test_a_nan_on_any_rank_is_the_result(reducer: Reducer) -> None:
    """On the first rank as on the second, and beside integers of any size."""
    for other in (1.0, 2**63):
        nan, number = {"x": math.nan}, {"x": other}
        for ranks in (([nan], [number]), ([number], [nan]), ([number, nan, number],)):
            assert math.isnan(reduced(*ranks, reducers=reducer)["x"])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1j, "complex"),
        (torch.tensor(1j), "Tensor with dtype torch.complex64"),
        (np.array(["x"]), "ndarray with dtype <U1"),
        ({"a": [object()]}, "object"),
        (len, "builtin_function_or_method"),
    ],
)
def test_values_that_json_cannot_hold_are_refused(value: Any, kind: str) -> None:
    """The error names metric, method and type."""
    with pytest.raises(TrialError) as raised:
        BatchMetrics("evaluate_batch").add_call({"odd": value})
    expected = f'metric "odd" returned by evaluate_batch is or holds a value of type {kind}'
    assert expected in str(raised.value)


def test_a_tensor_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of a sharded model's gradients is the same on all; a part of a tensor is refused."""

    class OfAllRanks:
        def __init__(self, is_whole: bool) -> None:
            self.placements = [SimpleNamespace(is_replicate=lambda: is_whole)]

        def to_local(self) -> torch.Tensor:
            return torch.tensor(3.0)

    monkeypatch.setattr(metric_values, "DTensor", OfAllRanks)
    assert reduced([{"norm": OfAllRanks(True)}]) == {"norm": 3.0}
    with pytest.raises(TrialError, match=r'"norm" returned by train_batch .* its full_tensor\(\)'):
        reduced([{"norm": OfAllRanks(False)}])


@pytest.mark.parametrize(("outcome", "kind"), [(None, "NoneType"), (3.0, "float"), ([1], "list")])
def test_a_batch_returns_a_tensor_or_a_dict(outcome: Any, kind: str) -> None:
    """Anything else is refused; the error names its type."""
    message = f"train_batch must return a dictionary .* returned a value of type {kind}"
    with pytest.raises(TrialError, match=message):
        BatchMetrics().add_call(outcome)


def test_names_are_strings() -> None:
    """Other names are refused."""
    with pytest.raises(TrialError, match=r"metric named 3 \(of type int\)"):
        BatchMetrics().add_call({3: 1.0})  # type: ignore[dict-item]


def test_names_must_match_across_batches() -> None:
    """The error names the metrics that are missing or new."""
    metrics = BatchMetrics("evaluate_batch")
    metrics.add_call({"loss": 1.0, "accuracy": 0.5})
    message = (
        r"metric names must match across all batches of data, but evaluate_batch returned "
        r"no \['accuracy'\] and also \['acc'\] in call 1"
    )
    with pytest.raises(TrialError, match=message):
        metrics.add_call({"loss": 1.0, "acc": 0.5})


def test_names_must_match_across_ranks() -> None:
    """The error names the rank and the metrics."""
    message = r"rank 2 returned no \['a'\] and also \['b'\], compared with rank 0"
    with pytest.raises(TrialError, match=message):
        reduced([{"a": 1}], [], [{"b": 1}])


def test_shapes_must_match() -> None:
    """Metrics whose shape differs between batches or ranks are refused."""
    with pytest.raises(TrialError, match=r'metric "m" has shape \(2,\) in call 1 .* \(3,\) in the'):
        rank_of({"m": [1, 2, 3]}, {"m": torch.ones(2)})
    with pytest.raises(TrialError, match=r'metric "m" differs in shape between ranks: {0: \(2,\)'):
        reduced([{"m": [1, 2]}], [{"m": 1}])


def test_reducers_must_match_the_metrics() -> None:
    """One Reducer, or one for each metric."""
    with pytest.raises(TrialError, match=r"expected \['a', 'b'\], got \['a'\]"):
        reduced([{"a": 1, "b": 1}], reducers={"a": Reducer.AVG})
    with pytest.raises(TrialError, match=r"gives 'mean' .* for metric \"a\""):
        reduced([{"a": 1}], reducers={"a": "mean"})
    with pytest.raises(TrialError, match="gives None"):
        reduced([{"a": 1}], reducers=None)


LIMITS: dict[Any, tuple[int, int]] = {
    bool: (0, 1), torch.uint8: (0, 2**8 - 1), torch.int32: (-(2**31), 2**31 - 1),
    np.int64: (-(2**63), 2**63 - 1), torch.int64: (-(2**63), 2**63 - 1),
    np.uint64: (0, 2**64 - 1), torch.uint64: (0, 2**64 - 1), int: (-(2**63), 2**64 - 1),
}  # fmt: skip


@st.composite
def integers(draw: st.DrawFn) -> tuple[int, Any]:
    """An integer, and the same as a trial may return it."""
    kind, (smallest, largest) = draw(st.sampled_from(list(LIMITS.items())))
    number = draw(st.sampled_from([smallest, largest, largest // 2]))
    is_tensor = isinstance(kind, torch.dtype)
    return number, torch.tensor(number, dtype=kind) if is_tensor else kind(number)


def as_list(number: Any) -> Any:
    return number.reshape(1) if isinstance(number, torch.Tensor) else [number]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(integers(), min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_integers_are_exact(ranks: list[list[tuple[int, Any]]], are_lists: bool) -> None:
    """Their sums and extremes, of all types and sizes. A sum that no message holds is refused."""
    exact = [number for rank in ranks for number, _ in rank]
    batches = [
        [{"n": as_list(value) if are_lists else value} for _, value in rank] for rank in ranks
    ]

    def of_all(reducer: Reducer) -> Any:
        return reduced(*batches, reducers=reducer)["n"]

    assert (of_all(Reducer.MAX), of_all(Reducer.MIN)) == (max(exact), min(exact))
    assert of_all(Reducer.AVG) == pytest.approx(sum(exact) / len(exact), rel=1e-15, abs=0)
    if -(2**63) <= sum(exact) < 2**64:
        assert of_all(Reducer.SUM) == sum(exact)
    else:
        with pytest.raises(TrialError, match=r'the sum of metric "n" over all batches .* bits'):
            of_all(Reducer.SUM)


@pytest.mark.parametrize("count", [2**64, -(2**63) - 1, [2**70, -1], [2**70, 0.5], {"a": 2**64}])
def test_an_integer_that_no_message_holds_is_refused(count: Any) -> None:
    """When it is returned, before it becomes another number or an error of MessagePack."""
    for report in (
        lambda: BatchMetrics("a hook").add_call({"count": count}),
        lambda: as_reported({"count": count}, "a hook"),
    ):
        with pytest.raises(TrialError, match=r'metric "count" returned by a hook .* as a float'):
            report()


def test_integers_of_single_batches_are_exact() -> None:
    """On one rank; over the ranks they are averaged."""
    large, small = 2**63 + 5, torch.tensor(5, dtype=torch.uint64)
    metrics = BatchMetrics()
    metrics.add_call({"n": large, "list": [large, -1], "tensor": torch.tensor(2**63 - 1)})
    metrics.add_call({"n": None, "list": [True, 1], "tensor": small})
    assert plain(metrics.per_call()) == [
        {"n": large, "list": [large, -1], "tensor": 2**63 - 1},
        {"n": None, "list": [1, 1], "tensor": 5},
    ]
    partials = metrics.partials(with_values=True)
    assert plain(calls_over_ranks([partials, partials])) == [
        {"n": 2.0**63, "list": [2.0**63, -1.0], "tensor": 2.0**63},
        {"n": None, "list": [1.0, 1.0], "tensor": 5.0},
    ]


def test_text_of_numpy_is_plain_text() -> None:
    """Messages can hold `str`, and no subclass of it."""
    metrics = BatchMetrics()
    metrics.add_call({"label": np.str_("cat"), "all": [np.str_("cat"), np.str_("dog")]})
    reported = combine([metrics.partials()])
    assert reported == {"label": "cat", "all": ["cat", "dog"]}
    assert [type(each) for each in (reported["label"], *reported["all"])] == [str] * 3
