"""Types of single values: each refuses what it cannot take in plain words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict, StringConstraints

from trial_core.config.error_text import Location, Problem, kind, refusal, refusals, shown


def _integer(words: str, at_least: int, at_most: int | None = None) -> BeforeValidator:
    def check(value: Any) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < at_least or (at_most is not None and value > at_most):
            raise refusal(f"expected {words}, got {shown(value)}")
        return int(value)

    return BeforeValidator(check)


MAX_SEED = 2**31 - 1

# No `Field` in a type that several fields share: before pydantic 2.11, a default that one of them
# gives leaks into the others.
Positive = Annotated[int, Ge(1), _integer("a positive integer", 1)]
Count = Annotated[int, Ge(0), _integer("an integer of at least 0", 0)]
Seed = Annotated[
    int,
    Ge(0),
    Le(MAX_SEED),
    _integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED),
]
Text = Annotated[str, StringConstraints(strict=True, min_length=1)]
Flag = Annotated[bool, Strict()]


def plain_mapping(value: Any) -> Any:
    """A mapping of plain data, as JSON can carry it; keys become text, as in JSON."""
    problems: list[Problem] = []
    plain = as_plain(value, (), problems)
    if problems:
        raise refusals(problems)
    return plain


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=str)


def as_plain(value: Any, path: Location, problems: list[Problem]) -> Any:
    """`value` as JSON can carry it; what it cannot is added to `problems`."""
    if isinstance(value, Mapping):
        named = {_key(key): inner for key, inner in value.items()}
        return {key: as_plain(inner, (*path, key), problems) for key, inner in named.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner, (*path, i), problems) for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append((path, f"{value} cannot be stored as JSON; write it as text, in quotes"))
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        expected = "numbers, text, true or false, lists and mappings"
        problems.append((path, f"expected plain data ({expected}), got {kind(value)}"))
    return value


PlainMapping = Annotated[dict[str, Any], BeforeValidator(plain_mapping)]
