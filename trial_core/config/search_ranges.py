"""Search ranges of hyperparameters, as Determined's YAML files have them.

A run trains one trial, so one value is drawn from each range, as by Determined's searcher `single`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

_TYPES = ("int", "double", "log", "categorical")
_SECTION = "hyperparameters"


def _is_search_range(value: Mapping[str, Any]) -> bool:
    """Return whether `value` is a range such as ``{type: int, minval: 1, maxval: 4}``."""
    return value.get("type") in _TYPES and not {"minval", "maxval", "vals"}.isdisjoint(value)


def draw(values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Plain hyperparameters with a value drawn at random in place of each search range.

    The seed and a range's place decide: all ranks and attempts draw the same value, whatever the
    other hyperparameters are. A warning names each value.

    Raises:
        ValidationError: a range is not complete, or is empty.
    """
    problems: list[Problem] = []
    drawn: dict[str, Any] = _drawn(values, (_SECTION,), seed, problems)
    if problems:
        raise validation_errors(problems)
    return drawn


def _drawn(value: Any, path: Location, seed: int, problems: list[Problem]) -> Any:
    if isinstance(value, list):
        return [_drawn(inner, (*path, i), seed, problems) for i, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if not _is_search_range(value):
        return {key: _drawn(inner, (*path, key), seed, problems) for key, inner in value.items()}
    place = format_path(path)
    try:
        drawn = _draw_from(value, Random(f"{seed} {place}"))
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
        problem = (
            f'cannot draw a value from this search range of type "{value["type"]}"; expected '
            '"categorical" with a list vals, or "int", "double" or "log" with numbers minval and '
            "maxval (and base); or give one value"
        )
        problems.append((path, problem))
        return None
    warn(
        f"{place}: {format_value(drawn)} is drawn from its search range, by "
        f"reproducibility.experiment_seed={seed}; give one value to choose it"
    )
    return _drawn(drawn, (*path, "vals"), seed, problems)  # a choice may have ranges of its own


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
