"""Saying in plain words what is wrong: its path, what was expected, what was seen.

Values never travel inside an error: it carries its message alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Location = tuple[Any, ...]
"""Where something is: names of fields and indices of lists, from the outside in."""
Problem = tuple[Location, str]
"""Where something is wrong, and what."""


class IgnoredFieldWarning(UserWarning):
    """A field that Determined knows and that has no effect here; the message says its path."""


def warn_ignored(message: str) -> None:
    """Warns that something in the experiment has no effect."""
    # Explicitly, as the stack is pydantic's: no level of it would point to the experiment.
    warnings.warn_explicit(message, IgnoredFieldWarning, filename="<experiment>", lineno=1)


def shown(value: object) -> str:
    """A value as an error message shows it: short, and never the inside of a collection."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 60 else value[:57] + "...", ensure_ascii=False)
    return kind(value)


def kind(value: object) -> str:
    """What sort of value it is, for messages that must not show the value itself."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a {type(value).__name__}"


def refusal(message: str, *path: str | int) -> ValidationError:
    """What a validator raises to refuse its value, or the part of it that lies at `path`."""
    return refusals([(path, message)])


def refusals(problems: Sequence[Problem]) -> ValidationError:
    """What a validator raises to refuse several parts of its value at once."""
    details = [
        InitErrorDetails(type=PydanticCustomError("config", message), loc=path, input=None)
        for path, message in problems
    ]
    return ValidationError.from_exception_data("config", details, hide_input=True)


def dotted(path: Location) -> str:
    """A path as a person writes it: ``labels[1]``, ``searcher.max_length.batches``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def error_lines(error: ValidationError) -> list[str]:
    """One line for each problem: its path, what was expected, what was seen."""
    lines = []
    for details in error.errors(include_url=False):
        path = dotted(details["loc"])
        message = in_words(details)
        lines.append(f"{path}: {message}" if path else message)
    return lines


def in_words(details: ErrorDetails, show: Callable[[object], str] = shown) -> str:
    """Pydantic's error in plain words; the section's own errors are so already."""
    seen = show(details["input"])
    words: dict[str, Callable[[], str]] = {
        "missing": lambda: "missing",
        "extra_forbidden": lambda: "unknown field",
        "string_type": lambda: f"expected text, got {seen}{_quote_it(details['input'])}",
        "string_too_short": lambda: "expected text, got nothing",
        "path_type": lambda: f"expected the path of a folder, got {seen}",
        "bool_type": lambda: f"expected true or false, got {seen}",
        "list_type": lambda: f"expected a list, got {seen}",
        "dict_type": lambda: f"expected a mapping, got {seen}",
        "literal_error": lambda: (
            f"expected {details['ctx']['expected'].replace(chr(39), chr(34))}, got {seen}"
        ),
    }
    word = words.get(details["type"])
    return word() if word else details["msg"]


def _quote_it(value: object) -> str:
    return " (text needs quotes here)" if isinstance(value, (bool, int, float)) else ""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """``; did you mean "metric"?`` where `name` nearly is one of `names`, else nothing."""
    near = nearest(name, names)
    return f'; did you mean "{near}"?' if near else ""


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The one of `names` that was probably meant, if any."""
    return next(iter(get_close_matches(name.lower(), names, n=1)), None)
