"""to_device: moves all tensors of a nested batch, and keeps its structure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trial_core.rank.trial.device_transfer import to_device

# A device without values, which every machine has.
META = torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


class MovesItself:
    """Like a batch of a graph library."""

    device: Any = None

    def to(self, device: Any) -> MovesItself:
        self.device = device
        return self


def with_default(**items: Any) -> Any:
    made: Any = defaultdict(list)
    made.update(items)
    return made


@pytest.mark.parametrize(
    ("data", "get"),
    [
        (torch.ones(2), lambda moved: moved),
        (np.ones(2), lambda moved: moved),
        ([torch.ones(2)], lambda moved: moved[0]),
        ((1, [{"a": (torch.ones(2),)}]), lambda moved: moved[1][0]["a"][0]),
        (Pair(np.ones(2), 3), lambda moved: moved.x),
        (OrderedDict(a=torch.ones(2)), lambda moved: moved["a"]),
        (with_default(a=torch.ones(2)), lambda moved: moved["a"]),
        (pack_sequence([torch.ones(2)]), lambda moved: moved.data),
        (MovesItself(), lambda moved: moved),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_nested_is_moved(data: Any, get: Any) -> None:
    """Tensors and arrays are moved, and containers keep their type."""
    moved = to_device(data, META, {int})
    assert torch.device(get(moved).device) == META
    if not isinstance(data, np.ndarray):
        assert type(moved) is type(data)


def test_containers_are_not_changed() -> None:
    """The batch that was passed in is not modified."""
    data = with_default(a=torch.ones(2), b=[torch.ones(2)])
    moved = to_device(data, META, set())
    assert data["a"].device.type == data["b"][0].device.type == "cpu"
    assert moved["missing"] == []


def test_values_and_types_of_arrays_are_kept() -> None:
    """Also of read-only and reversed arrays, and arrays of foreign byte order."""
    read_only = np.arange(3, dtype=np.int32)
    read_only.setflags(write=False)
    for array in (
        np.array([True, False]),
        np.array(1.5, dtype=np.float16),
        read_only,
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4"),
    ):
        moved = to_device(array, "cpu", set())
        assert moved.tolist() == array.tolist()
        assert str(moved.dtype).removeprefix("torch.") == array.dtype.newbyteorder("=").name


def test_read_only_arrays_are_not_written_to() -> None:
    """Writing to the tensor of a read-only array does not change the array."""
    array = np.arange(1, 4)
    array.setflags(write=False)
    to_device(array, "cpu", set()).zero_()
    assert array.tolist() == [1, 2, 3]


def test_other_types_are_returned_unchanged_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning for each type."""
    warned: set[type] = set()
    data = {"id": "a", "ids": ["b", "c"], "n": 1, "words": np.array(["x"])}
    for _ in range(2):
        moved = to_device(data, META, warned)
        assert moved == data
    assert warned == {str, int, np.ndarray}
    assert len(caplog.records) == 3
    assert "objects of type str" in caplog.text


def test_a_read_only_mapping_becomes_a_dict() -> None:
    """Since it cannot be modified."""
    moved = to_device(MappingProxyType({"a": torch.ones(1)}), META, set())
    assert moved["a"].device == META
