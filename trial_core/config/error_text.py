"""Messages of validation errors: the path, the expected and the actual value.

An error carries only its message, never the value: values may be secrets.
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


def type_name(value: object) -> str:
    """The type of a value, for messages that must not show the value."""
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


def error_message(details: ErrorDetails, show: Callable[[object], str] = format_value) -> str:
    """The plain message for pydantic's error; a section's own message is kept."""
    seen = show(details["input"])
    messages: dict[str, Callable[[], str]] = {
        "missing": lambda: "missing",
        "extra_forbidden": lambda: "unknown field",
        "string_type": lambda: f"expected text, got {seen}{_quotes_hint(details['input'])}",
        "string_too_short": lambda: "expected text, got nothing",
        "path_type": lambda: f"expected the path of a folder, got {seen}",
        "bool_type": lambda: f"expected true or false, got {seen}",
        "list_type": lambda: f"expected a list, got {seen}",
        "dict_type": lambda: f"expected a mapping, got {seen}",
        "literal_error": lambda: (
            f"expected {details['ctx']['expected'].replace(chr(39), chr(34))}, got {seen}"
        ),
    }
    message = messages.get(details["type"])
    return message() if message else details["msg"]


def _quotes_hint(value: object) -> str:
    return " (text needs quotes here)" if isinstance(value, (bool, int, float)) else ""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """``; did you mean "metric"?`` if one of `names` is similar to `name`, else nothing."""
    near = closest_match(name, names)
    return f'; did you mean "{near}"?' if near else ""


def closest_match(name: str, names: Sequence[str]) -> str | None:
    """The one of `names` that is most similar to `name`, if any is similar enough."""
    return next(iter(get_close_matches(name.lower(), names, n=1)), None)
