"""What is not readable is refused when it is saved; unusual containers are saved as plain ones."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trial_core.errors import TrialError
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable


class AttrDict(dict[str, Any]):
    """A dict whose keys are also attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: Any


class Known(NamedTuple):
    """A tuple of a class that the reader constructs."""

    x: int


class Greeting:
    """A class that torch does not know."""


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (AttrDict(a=AttrDict(b=[1])), {"a": {"b": [1]}}),
        (defaultdict(list, {"a": deque([1, 2])}), {"a": [1, 2]}),
        (UserDict({1: UserList([Point(1, AttrDict())])}), {1: [(1, {})]}),
        (MappingProxyType({"a": 0.5}), {"a": 0.5}),
        (Counter("aab"), Counter("aab")),
        ((1, [np.float32(2), torch.Size([3])]), (1, [np.float32(2), torch.Size([3])])),
        ([Known(1)], [Known(1)]),
    ],
    ids=["AttrDict", "defaultdict", "user", "proxy", "Counter", "plain", "known"],
)
def test_mappings_and_sequences_are_stored_as_plain_ones(
    tmp_path: Path, value: Any, plain: Any
) -> None:
    """At any depth; those of classes that the reader knows stay what they are."""
    reader = Reader(classes=[Known])
    torch.save(readable({"state": value}, reader), tmp_path / "state.pt")
    loaded = reader.load(tmp_path / "state.pt")["state"]
    assert loaded == plain
    assert repr(loaded) == repr(plain)


@pytest.mark.parametrize("factory", [list, None, Greeting])
def test_a_mapping_of_a_class_that_the_reader_constructs(factory: Any) -> None:
    """Is stored as a plain one, too: it may have a factory or a value that needs trust."""
    reader = Reader(classes=[defaultdict])
    stored = readable({"state": defaultdict(factory, {"a": [1]})}, reader)["state"]
    assert (type(stored), stored) == (dict, {"a": [1]})
    with pytest.raises(TrialError, match=r"Greeting at state\.a,"):
        readable({"state": defaultdict(factory, {"a": Greeting()})}, reader)


def test_what_is_plain_already_is_not_copied() -> None:
    """Tensors never, and containers only around a converted one."""
    weights = OrderedDict(layer=torch.ones(2))
    weights._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # as a module's
    state = {"module": weights, "config": AttrDict(a=1), "shared": [weights]}
    converted = readable(state, Reader())
    assert converted["module"] is weights
    assert converted["shared"] is state["shared"]
    assert state["config"] is not converted["config"]
    changed = OrderedDict(weights, extra=AttrDict())
    changed._metadata = weights._metadata  # type: ignore[attr-defined]
    assert readable(changed, Reader())._metadata == {"": {"version": 2}}


def test_a_container_that_is_used_twice_or_holds_itself() -> None:
    """Shared containers stay shared."""
    shared, itself = AttrDict(a=1), [1]
    itself.append(itself)  # type: ignore[arg-type]
    first, second, third = readable([shared, shared, itself], Reader())
    assert first is second
    assert third is itself


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (
            {"callbacks": {"early": {"best": [1, Greeting()]}}},
            f"an object of {__name__}.Greeting at callbacks.early.best.1, and no run could resume",
        ),
        ({"of": {Greeting: 1}}, f"{__name__}.Greeting at of,"),
        ({"lock": AttrDict(a=threading.Lock())}, "an object of _thread.lock at lock.a: cannot"),
        ({"step": lambda: 0}, "an object of builtins.function at step: "),
    ],
    ids=["class", "key", "lock", "function"],
)
def test_what_would_not_be_read_is_refused(state: dict[str, Any], part: str) -> None:
    """The error says what, where, and what to save instead."""
    with pytest.raises(TrialError) as refusal:
        readable(state, Reader())
    assert part in str(refusal.value)
    assert "Save numbers, text, tensors and arrays instead" in str(refusal.value)


def test_a_trusting_reader_gets_every_object_as_it_is() -> None:
    """So does one whose classes were allowed."""
    state = {"greeting": Greeting(), "config": AttrDict(a=1)}
    assert readable(state, Reader(trusted=True)) is state
    with torch.serialization.safe_globals([Greeting, AttrDict]):
        allowed = readable(state, Reader())
    assert allowed is state
