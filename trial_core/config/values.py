"""Types of single values, each with a plain error message."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    PlainValidator,
    Strict,
    StringConstraints,
    WithJsonSchema,
)

from trial_core.config.error_text import (
    Location,
    Problem,
    format_value,
    type_name,
    validation_error,
    validation_errors,
)

MAX_SEED = 2**31 - 1

MAX_COUNT = 10**10 - 1
"""The greatest number of batches: a manifest's key sorts by batches as long as they have 10 digits.
Other counts have the same limit."""

MAX_SECONDS = 10 * 365 * 86400
"""Ten years. Much longer times exceed the range of the system's calls, or of dates."""

MAX_LEVELS = 100
"""Collections within collections. Many more would exceed Python's stack."""

_STORED_INTEGERS = range(-(2**63), 2**64)


def _integer(value: Any, expected: str, at_least: int, at_most: int = MAX_COUNT) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value > at_most == MAX_COUNT:
        raise validation_error(f"expected at most {at_most}, got {format_value(value)}")
    if not is_integer or not at_least <= value <= at_most:
        raise validation_error(f"expected {expected}, got {format_value(value)}")
    return int(value)


def _checked(expected: str, at_least: int, at_most: int = MAX_COUNT) -> BeforeValidator:
    return BeforeValidator(lambda value: _integer(value, expected, at_least, at_most))


def _positive_or_auto(value: Any) -> int | str:
    return "auto" if value == "auto" else _integer(value, 'a positive integer or "auto"', 1)


# No `Field` in a type that several fields share: before pydantic 2.11, the default of one field
# leaks into the others.
Positive = Annotated[int, Ge(1), Le(MAX_COUNT), _checked("a positive integer", 1)]
Count = Annotated[int, Ge(0), Le(MAX_COUNT), _checked("an integer of at least 0", 0)]
Seed = Annotated[
    int, Ge(0), Le(MAX_SEED), _checked(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)
]
PositiveOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_positive_or_auto),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_COUNT},
                {"type": "string", "const": "auto"},
            ]
        }
    ),
]
Seconds = Annotated[float, Gt(0), Le(MAX_SECONDS), AllowInfNan(False)]
Text = Annotated[str, StringConstraints(strict=True, min_length=1)]
Flag = Annotated[bool, Strict()]


def validate_plain_mapping(value: Any) -> Any:
    """A mapping of data that JSON can represent; keys become text, as in JSON."""
    problems: list[Problem] = []
    plain = to_plain_data(value, (), problems)
    if problems:
        raise validation_errors(problems)
    return plain


def _key(key: Any) -> str:
    if isinstance(key, int) and key not in _STORED_INTEGERS:
        return format_value(key)
    return str.__str__(key) if isinstance(key, str) else json.dumps(key, default=str)


def is_unicode(text: str) -> bool:
    """Return whether `text` can be stored: UTF-8 cannot encode a lone half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_plain_data(value: Any, path: Location, problems: list[Problem]) -> Any:
    """Convert `value` to data that JSON can represent. Adds its invalid parts to `problems`."""
    if len(path) > MAX_LEVELS:
        problems.append((path[:1], f"more than {MAX_LEVELS} levels of lists and mappings"))
        return None
    if isinstance(value, Mapping):
        named = {_key(key): inner for key, inner in value.items()}
        if not all(map(is_unicode, named)):
            problems.append((path, "a key has a character that UTF-8 cannot encode"))
            return None
        return {key: to_plain_data(inner, (*path, key), problems) for key, inner in named.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_data(inner, (*path, i), problems) for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append((path, f"{value} cannot be stored as JSON; write it as text, in quotes"))
    elif isinstance(value, int) and value not in _STORED_INTEGERS:
        seen = format_value(value)
        problems.append((path, f"{seen} does not fit into 64 bits; write it as text, in quotes"))
    elif isinstance(value, str) and not is_unicode(value):
        problems.append((path, f"{format_value(value)} has a character that UTF-8 cannot encode"))
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        expected = "numbers, text, true or false, lists and mappings"
        problems.append((path, f"expected plain data ({expected}), got {type_name(value)}"))
    return _of_plain_type(value)


def _of_plain_type(value: Any) -> Any:
    """The value without its class, if that is one derived from a plain one, as `numpy.float64`."""
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's own `str` is its name
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


PlainMapping = Annotated[dict[str, Any], BeforeValidator(validate_plain_mapping)]
