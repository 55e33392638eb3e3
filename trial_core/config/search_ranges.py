"""Search ranges of hyperparameters, as Determined's YAML files have them.

A run trains one trial, with one value of each range: `draw`, as by Determined's searcher `single`.
A search trains many: `sample` and `grid`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from trial_core.config.error_text import (
    Location,
    Problem,
    format_path,
    format_value,
    validation_errors,
    warn,
)

MAX_POINTS = 100_000
"""Of a grid."""

_TYPES = ("int", "double", "log", "categorical")
_SECTION = "hyperparameters"


def is_search_range(value: Any) -> bool:
    """Return whether `value` is a range such as ``{type: int, minval: 1, maxval: 4}``."""
    return (
        isinstance(value, Mapping)
        and value.get("type") in _TYPES
        and not {"minval", "maxval", "vals"}.isdisjoint(value)
    )


def draw(values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Plain hyperparameters with a value drawn at random in place of each search range.

    The seed and a range's place decide: all ranks and attempts draw the same value, whatever the
    other hyperparameters are. A warning names each value.

    Raises:
        ValidationError: a range is not complete, or is empty.
    """

    def drawn(search_range: Mapping[str, Any], place: str) -> Any:
        value = _draw_from(search_range, Random(f"{seed} {place}"))
        warn(
            f"{place}: {format_value(value)} is drawn from its search range, by "
            f"reproducibility.experiment_seed={seed}; give one value to choose it"
        )
        return value

    resolved: dict[str, Any] = _checked_resolved(values, drawn)
    return resolved


def sample(values: Mapping[str, Any], random_of: Callable[[str], Random]) -> dict[str, Any]:
    """Hyperparameters of one trial of a search, each drawn by the generator that `random_of` gives
    for the place of its range."""
    drawn: dict[str, Any] = _checked_resolved(
        values, lambda each, place: _draw_from(each, random_of(place))
    )
    return drawn


def ranges_of(value: Any, path: Location = ()) -> Iterator[tuple[Location, Mapping[str, Any]]]:
    """The ranges in hyperparameters, and their paths; not those within choices."""
    if is_search_range(value):
        yield path, value
        return
    inner = value.items() if isinstance(value, Mapping) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from ranges_of(each, (*path, key))


def grid(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All points of the grid: those of Determined's, in its order: by the names of ranges, the last
    one varies fastest. A range of numbers has `count` values at equal distances, with its ends."""
    return [dict(point) for point in _points(values)]


def check(values: Mapping[str, Any], *, needs_counts: bool) -> bool:
    """Check that values can be drawn from each range, and return whether there is one.

    Args:
        needs_counts: True for a grid: each range of numbers must have a `count`.

    Raises:
        ValidationError: a range is not complete, or is empty; or the grid has too many points.
    """
    ranges, uncounted = 0, []

    def check_range(search_range: Mapping[str, Any], place: str) -> Any:
        nonlocal ranges
        ranges += 1
        count = search_range.get("count")
        is_counted = type(count) is int and count >= 1
        if needs_counts and search_range["type"] != "categorical" and not is_counted:
            uncounted.append(place)
        elif needs_counts and is_counted and search_range["count"] <= MAX_POINTS:
            _grid_values(search_range)
        return _draw_from(search_range, Random(0))

    _checked_resolved(values, check_range)
    problems: list[Problem] = [
        ((place,), "a grid needs the number of its values: count: 3, for example")
        for place in uncounted
    ]
    if not problems and needs_counts and _size(values) > MAX_POINTS:
        problems = [((_SECTION,), f"the grid has {_size(values)} points, at most {MAX_POINTS}")]
    if problems:
        raise validation_errors(problems)
    return ranges > 0


def _checked_resolved(value: Any, value_of: Callable[[Mapping[str, Any], str], Any]) -> Any:
    problems: list[Problem] = []
    resolved = _resolved(value, (_SECTION,), value_of, problems)
    if problems:
        raise validation_errors(problems)
    return resolved


def _resolved(
    value: Any,
    path: Location,
    value_of: Callable[[Mapping[str, Any], str], Any],
    problems: list[Problem],
) -> Any:
    if isinstance(value, list):
        return [_resolved(inner, (*path, i), value_of, problems) for i, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if not is_search_range(value):
        return {
            key: _resolved(inner, (*path, key), value_of, problems) for key, inner in value.items()
        }
    try:
        chosen = value_of(value, format_path(path))
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
        problem = (
            f'cannot draw a value from this search range of type "{value["type"]}"; expected '
            '"categorical" with a list vals, or "int", "double" or "log" with numbers minval and '
            "maxval (and base); or give one value"
        )
        problems.append((path, problem))
        return None
    # A choice may have ranges of its own.
    return _resolved(chosen, (*path, "vals"), value_of, problems)


def _draw_from(search_range: Mapping[str, Any], random: Random) -> Any:
    type_ = search_range["type"]
    if type_ == "categorical":
        if not isinstance(search_range["vals"], list):
            raise TypeError  # text has elements, too
        return random.choice(search_range["vals"])
    lowest, highest = search_range["minval"], search_range["maxval"]
    if type_ == "int":
        return random.randint(lowest, highest)
    if lowest > highest:
        raise ValueError
    number = random.uniform(lowest, highest)
    base = 1.0 if type_ == "double" else search_range.get("base", 10.0)
    if base <= 0 or not math.isfinite(number):
        raise ValueError  # the power of a negative number may be a complex one
    return number if type_ == "double" else base**number


def _points(value: Any) -> Iterator[Any]:
    """All values that hyperparameters, or a part of them, have in a grid."""
    if is_search_range(value):
        for each in _grid_values(value):
            yield from _points(each)
    elif isinstance(value, Mapping):
        names = sorted(value)
        for point in itertools.product(*(list(_points(value[name])) for name in names)):
            chosen = dict(zip(names, point, strict=True))
            yield {name: chosen[name] for name in value}
    elif isinstance(value, list):
        for point in itertools.product(*(list(_points(each)) for each in value)):
            yield list(point)
    else:
        yield value


def _size(value: Any) -> int:
    if is_search_range(value):
        if value["type"] == "categorical":
            return sum(map(_size, value["vals"]))
        return int(value["count"])
    inner = value.values() if isinstance(value, Mapping) else value
    return math.prod(map(_size, inner)) if isinstance(value, (Mapping, list)) else 1


def _grid_values(search_range: Mapping[str, Any]) -> list[Any]:
    type_ = search_range["type"]
    if type_ == "categorical":
        return list(search_range["vals"])
    lowest, highest, count = (search_range[name] for name in ("minval", "maxval", "count"))
    if type_ == "int":
        count = min(count, highest - lowest + 1)
    width = highest - lowest
    numbers = [lowest + i * width / (count - 1) for i in range(count)] if count > 1 else []
    numbers = numbers or [(lowest + highest) / 2]
    if type_ == "int":  # as Go rounds: a half away from zero
        return [int(math.copysign(math.floor(abs(each) + 0.5), each)) for each in numbers]
    return [search_range.get("base", 10.0) ** n for n in numbers] if type_ == "log" else numbers
