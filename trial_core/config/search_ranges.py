"""Search ranges of hyperparameters, as Determined's YAML files have them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from random import Random
from typing import Any

from trial_core.config.error_text import format_value
from trial_core.errors import ConfigError

logger = logging.getLogger(__name__)

_TYPES = ("int", "double", "log", "categorical")


def is_search_range(value: Mapping[str, Any]) -> bool:
    """Return whether `value` is a range such as ``{type: int, minval: 1, maxval: 4}``."""
    return value.get("type") in _TYPES and not {"minval", "maxval", "vals"}.isdisjoint(value)


def draw(values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """`values` with a value drawn at random in place of each search range, and constants resolved.

    The same seed draws the same values, so that all ranks agree. The log names the values.

    Raises:
        ConfigError: a range is not complete, or is empty.
    """
    drawn: dict[str, Any] = _drawn(values, "hyperparameters", Random(seed))
    return drawn


def _drawn(value: Any, path: str, random: Random) -> Any:
    if isinstance(value, (list, tuple)):
        return [_drawn(inner, f"{path}.{i}", random) for i, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "const" and set(value) == {"type", "val"}:
        return value["val"]
    if not is_search_range(value):
        return {key: _drawn(inner, f"{path}.{key}", random) for key, inner in value.items()}
    try:
        drawn = _draw_from(value, random)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
        raise ConfigError(
            f"{path}: cannot draw a value from {format_value(dict(value))}; expected type "
            '"categorical" with a list vals, or "int", "double" or "log" with numbers minval and '
            "maxval (and base)"
        ) from None
    logger.info("%s: %s is drawn from its search range", path, format_value(drawn))
    return drawn


def _draw_from(search_range: Mapping[str, Any], random: Random) -> Any:
    type_ = search_range["type"]
    if type_ == "categorical":
        if not isinstance(search_range["vals"], (list, tuple)):
            raise TypeError  # text has elements, too
        return random.choice(search_range["vals"])
    lowest, highest = search_range["minval"], search_range["maxval"]
    if type_ == "int":
        return random.randint(lowest, highest)
    if lowest > highest:
        raise ValueError
    number = random.uniform(lowest, highest)
    if type_ == "double":
        return number
    base = search_range.get("base", 10.0)
    if base <= 0:
        raise ValueError  # the power of a negative number may be a complex one
    return base**number
