"""Fuzz tests: their profiles, and strategies for what a stranger may send or store.

Most values are valid objects with a few changes: random bytes are refused at the first byte, and
test nothing behind it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

LONG_FACTOR = 50
"""How many times the quick profile's examples a long test tries."""

DEEP_LEVELS = {"<deep 150>": 150, "<deep 600>": 600, "<deep 100000>": 100_000}
"""Marks that `json_bytes` writes as nested lists: Python's own writer refuses so many."""
DIGITS = "<5000 digits>"

TIMES = [
    "2031-13-41T25:61:61Z",
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59Z",
    "2031-05-09",
    "2031-05-09T17:04:00",
]
TEXTS = [
    "", " ", "\0", "~\0", "..", "../../x", "a/b", "\ud800", "é\u2028\x1b[2J", "x" * 300,
    "-", "1", "nan", "http://[", "\u0663@\u0663", "9" * 5000 + "@1",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**18, 10**30, 10**300,
    0.5, -0.0, 1e308, float("nan"), float("inf"),
]  # fmt: skip
odd_values = st.sampled_from(
    [
        None, True, *NUMBERS, *TEXTS, *TIMES, *DEEP_LEVELS, DIGITS,
        [], {}, [[]], [None], {"": None}, {"$float": "nan"}, {"$float": []}, {"type": "const"},
    ]
)  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
plain_data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def fuzz(
    quick: int, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test that tries the same `quick` examples each time; its long form tries new ones.

    Examples have no deadline, and nothing is stored between runs.
    """

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize(
            "examples",
            [
                pytest.param(quick, id="quick"),
                pytest.param(quick * LONG_FACTOR, id="long", marks=pytest.mark.long),
            ],
        )
        def test(examples: int) -> None:
            is_quick = examples == quick
            profile = settings(
                max_examples=examples,
                derandomize=is_quick,
                database=None,
                deadline=None,
                print_blob=not is_quick,
                suppress_health_check=list(HealthCheck),
            )
            profile(given(**strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """Plain data with up to `most` changes at any depth: replaced, removed, renamed, wrapped."""
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, most))):
        result = _changed(draw, result)
    return result


def _changed(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        return _changed_mapping(draw, dict(value))
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(draw, value[at]), *value[at + draw(st.integers(0, 1)) :]]
    return draw(st.one_of(odd_values, odd_values.map(lambda odd: [value, odd]), plain_data))


def _changed_mapping(draw: st.DrawFn, value: dict[Any, Any]) -> dict[Any, Any]:
    key = draw(st.sampled_from(list(value)))
    kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"]))
    if kind == "replace":
        value[key] = _changed(draw, value[key])
    elif kind == "remove":
        del value[key]
    elif kind == "rename":
        value[draw(st.sampled_from(TEXTS))] = value.pop(key)
    else:
        value[draw(st.sampled_from([*TEXTS, "batches", "type", "url"]))] = draw(odd_values)
    return value


def json_bytes(value: Any) -> bytes:
    """The JSON of plain data, also of data that Python's own reader or writer would refuse."""
    text = json.dumps(value)
    for mark, levels in DEEP_LEVELS.items():
        text = text.replace(json.dumps(mark), "[" * levels + "]" * levels)
    return text.replace(json.dumps(DIGITS), "9" * 5000).encode()


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes as they are, cut off, or with some of them replaced or inserted."""
    kind = draw(st.sampled_from(["as is", "as is", "as is", "cut", "replaced", "inserted"]))
    at = draw(st.integers(0, len(data)))
    some = draw(st.binary(max_size=5) | st.sampled_from([b"\xff", b"\0", b"\xef\xbb\xbf", b"["]))
    if kind == "cut":
        return data[:at]
    if kind == "replaced":
        return data[:at] + some + data[at + len(some) :]
    return data[:at] + some + data[at:] if kind == "inserted" else data


def stored(value: Any) -> st.SearchStrategy[bytes]:
    """The bytes of a stored JSON object, changed in its values, in its bytes, or not at all."""
    return changed(value).map(json_bytes).flatmap(spoilt) | st.binary(max_size=40)
