"""The data of a retraining: the experiment's data with templates, and data given to one run.

Every text in an experiment's `data` is a Jinja template with three names::

    scheduled_time    the scheduled start of the run: a datetime, UTC
    timedelta         Python's timedelta
    ZoneInfo          Python's ZoneInfo, for local dates

    data: {begin: "{{ (scheduled_time - timedelta(days=7)).date() }}"}
          {day: "{{ scheduled_time.astimezone(ZoneInfo('Europe/Berlin')).date() }}"}

Templates run in Jinja's sandbox. Each result is text. Data given to one run is not rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trial_core.config.error_text import Problem, format_path, format_value
from trial_core.config.values import to_plain_data
from trial_core.config.yaml_file import override
from trial_core.errors import ConfigError

_TEMPLATE_MARKS = ("{{", "{%", "{#")
# The errors of an expression: a missing key, a division by zero, a date out of range.
_TEMPLATE_ERRORS = (
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


def render_data(data: Mapping[str, Any], scheduled_time: datetime) -> dict[str, Any]:
    """Render every text in `data`, at any depth. Keys are not rendered. `scheduled_time` is
    timezone-aware, UTC. Raises ConfigError, with a line and the path of each template that
    fails."""
    problems: list[str] = []
    result: dict[str, Any] = _render(data, ("data",), scheduled_time, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def check_plain_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data given to a single run, as plain JSON values. Raises ConfigError, with a line and the
    path of each value that cannot be stored as JSON."""
    problems: list[Problem] = []
    plain: dict[str, Any] = to_plain_data(data, ("data",), problems)
    if problems:
        raise ConfigError(
            "\n".join(f"{format_path(path)}: {message}" for path, message in problems)
        )
    return plain


def parse_data(assignments: Sequence[str]) -> dict[str, Any]:
    """The data given to a single run by ``--data KEY=VALUE``. Raises as `check_plain_data`."""
    return check_plain_data(override({}, assignments, "--data"))


def _render(
    value: Any, path: tuple[str | int, ...], scheduled_time: datetime, problems: list[str]
) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _render(inner, (*path, key), scheduled_time, problems)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_render(v, (*path, i), scheduled_time, problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or not any(mark in value for mark in _TEMPLATE_MARKS):
        return value
    try:
        return _jinja.from_string(value).render(scheduled_time=scheduled_time)
    except _TEMPLATE_ERRORS as error:
        problems.append(
            f"{format_path(path)}: the template {format_value(value)} cannot be rendered: "
            f"{error or type(error).__name__}; available names: scheduled_time (a datetime, UTC), "
            "timedelta and ZoneInfo"
        )
        return value
