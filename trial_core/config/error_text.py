"""Messages of validation errors: the path, the expected and the actual value.

An error carries only its message, never the value: values may be secrets. What is not YAML at all
is told by `yaml_file`.
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
"""A path in the file: names of fields and indices of lists, from the outside in."""
Problem = tuple[Location, str]
"""A path, and the problem there."""


class ExperimentWarning(UserWarning):
    """Something in an experiment that is allowed, but may not be meant."""


class IgnoredFieldWarning(ExperimentWarning):
    """A field of Determined that has no effect here; the message begins with its path."""


def warn(message: str, category: type[ExperimentWarning] = ExperimentWarning) -> None:
    """Warn of something in an experiment; the message begins with its path."""
    # `warn_explicit`, because no stack level points to the experiment: the stack is pydantic's.
    warnings.warn_explicit(message, category, filename="<experiment>", lineno=1)


def warn_ignored(message: str) -> None:
    """Warn that a field of the experiment has no effect."""
    warn(message, IgnoredFieldWarning)


def format_value(value: object) -> str:
    """A value for an error message: short, and without the contents of a collection."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 200:  # Python does not print very long ones
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        text = json.dumps(value if len(value) <= 60 else value[:57] + "...", ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode()  # a terminal shows valid UTF-8
    return type_name(value)


_TYPE_NAMES: Sequence[tuple[type | tuple[type, ...], str]] = (
    (type(None), "nothing"),
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    (Mapping, "a mapping"),
    ((list, tuple), "a list"),
)


def type_name(value: object) -> str:
    """The type of a value, for messages that must not show the value."""
    named = (name for kind, name in _TYPE_NAMES if isinstance(value, kind))
    return next(named, f"a {type(value).__name__}")


def validation_error(message: str, *path: str | int) -> ValidationError:
    """The error with which a validator refuses its value, or the part of it at `path`."""
    return validation_errors([(path, message)])


def validation_errors(problems: Sequence[Problem]) -> ValidationError:
    """The error with which a validator refuses several parts of its value."""
    details = [
        InitErrorDetails(type=PydanticCustomError("config", message), loc=path, input=None)
        for path, message in problems
    ]
    return ValidationError.from_exception_data("config", details, hide_input=True)


def format_path(path: Location) -> str:
    """A path as text: ``labels[1]``, ``searcher.max_length.batches``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def error_lines(error: ValidationError) -> list[str]:
    """One line per problem: its path, the expected and the actual value."""
    lines = []
    for details in error.errors(include_url=False):
        path = format_path(details["loc"])
        message = error_message(details)
        lines.append(f"{path}: {message}" if path else message)
    return lines


_MESSAGES = {
    "missing": "missing",
    "extra_forbidden": "unknown field",
    "string_type": "expected text, got {seen}{hint}",
    "string_too_short": "expected text, got nothing",
    "path_type": "expected the path of a folder, got {seen}",
    "bool_type": "expected true or false, got {seen}",
    "list_type": "expected a list, got {seen}",
    "dict_type": "expected a mapping, got {seen}",
    "literal_error": "expected {expected}, got {seen}",
}


def error_message(details: ErrorDetails, show: Callable[[object], str] = format_value) -> str:
    """The plain message for pydantic's error; a section's own message is kept."""
    value = details["input"]
    hint = " (text needs quotes here)" if isinstance(value, (bool, int, float)) else ""
    expected = str(details.get("ctx", {}).get("expected")).replace("'", '"')
    if (message := _MESSAGES.get(details["type"])) is None:
        return details["msg"]
    return message.format(seen=show(value), hint=hint, expected=expected)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """``; did you mean "metric"?`` if one of `names` is similar to `name`, else nothing."""
    near = closest_match(name, names)
    return f'; did you mean "{near}"?' if near else ""


def closest_match(name: str, names: Sequence[str]) -> str | None:
    """The one of `names` that is most similar to `name`, if any is similar enough."""
    return next(iter(get_close_matches(name.lower(), names, n=1)), None)
