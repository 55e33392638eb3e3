"""The data of a retraining: text with templates of the time it is scheduled for.

Every text among an experiment's `data` is a template of Jinja's, which knows three names::

    scheduled_time    when the run was to begin: a datetime, in UTC
    timedelta         Python's, to count from it
    ZoneInfo          Python's, for the date somewhere else

    data: {begin: "{{ (scheduled_time - timedelta(days=7)).date() }}"}
          {day: "{{ scheduled_time.astimezone(ZoneInfo('Europe/Berlin')).date() }}"}

Templates see nothing else, and run in Jinja's sandbox. A result is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trial_core.config.error_text import Problem, format_path, format_value
from trial_core.config.values import to_plain_data
from trial_core.errors import ConfigError

_MARKS = ("{{", "{%", "{#")
# What an expression may raise by itself: a missing key, a division by zero, a date out of range.
_MISTAKES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_jinja.globals = {"timedelta": timedelta, "ZoneInfo": ZoneInfo}


def rendered(data: Mapping[str, Any], scheduled_time: datetime) -> dict[str, Any]:
    """`data` with each text rendered, however deep it lies; its keys are left as they are.

    Args:
        scheduled_time: aware of its time zone, UTC.

    Raises:
        ConfigError: templates that cannot be rendered: one line each, with its path.
    """
    problems: list[str] = []
    result: dict[str, Any] = _rendered(data, ("data",), scheduled_time, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def checked(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is given over its experiment's data, as JSON can carry it.

    Raises:
        ConfigError: it cannot: one line for each place where.
    """
    problems: list[Problem] = []
    plain: dict[str, Any] = to_plain_data(data, ("data",), problems)
    if problems:
        raise ConfigError("\n".join(f"{format_path(path)}: {said}" for path, said in problems))
    return plain


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `over` has in its place; mappings that both have are merged in turn."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both and isinstance(before, Mapping) else value
    return result


def _rendered(
    value: Any, path: tuple[str | int, ...], scheduled_time: datetime, problems: list[str]
) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _rendered(inner, (*path, key), scheduled_time, problems)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_rendered(v, (*path, i), scheduled_time, problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or not any(mark in value for mark in _MARKS):
        return value
    try:
        return _jinja.from_string(value).render(scheduled_time=scheduled_time)
    except _MISTAKES as error:
        problems.append(
            f"{format_path(path)}: the template {format_value(value)} cannot be rendered: "
            f"{error or 'error'}; "
            "templates know scheduled_time (a datetime, UTC), timedelta and ZoneInfo"
        )
        return value
