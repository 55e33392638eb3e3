"""The data of a retraining."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from trial_core.errors import ConfigError
from trial_core.models.data_templates import check_plain_data, parse_data, render_data

AT = datetime(2026, 3, 1, 3, 30, tzinfo=timezone.utc)


def test_texts_are_rendered_at_any_depth() -> None:
    """Keys, other values and line ends are unchanged."""
    data = {
        "begin": "{{ (scheduled_time - timedelta(days=7)).date() }}",
        "files": [{"path": "s3://b/{{ scheduled_time.strftime('%Y/%m') }}\n"}, 3, None, True],
        "{{ key }}": "no template: {x}\r\n",
    }
    assert render_data(data, AT) == {
        "begin": "2026-02-22",
        "files": [{"path": "s3://b/2026/03\n"}, 3, None, True],
        "{{ key }}": "no template: {x}\r\n",
    }


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ tomorrow }}", "'tomorrow' is undefined"),
        ("{{ scheduled_time ", "unexpected end"),
        ("{{ scheduled_time - 3 }}", "unsupported operand"),
        ("{{ scheduled_time - timedelta(days=10**7) }}", "out of range"),
        ("{{ scheduled_time.astimezone(ZoneInfo('Nowhere')) }}", "Nowhere"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__ }}", "unsafe"),
        ("{{ [].append(1) }}", "unsafe"),
        ("{{ range(3) }}", "'range' is undefined"),
    ],
)
def test_a_template_that_cannot_be_rendered(template: str, problem: str) -> None:
    """The error has the path, the template, the problem and the available names."""
    with pytest.raises(ConfigError) as error:
        render_data({"window": [{"end": template}]}, AT)
    line = str(error.value)
    assert line.startswith("data.window[0].end: the template ")
    assert problem in line
    assert line.endswith(
        "available names: scheduled_time (a datetime, UTC), timedelta and ZoneInfo"
    )


def test_local_dates() -> None:
    """Half past eleven at night in UTC is the next day in Berlin."""
    day = "{{ scheduled_time.astimezone(ZoneInfo('Europe/Berlin')).date() }}"
    at = datetime(2026, 1, 31, 23, 30, tzinfo=timezone.utc)
    assert render_data({"day": day}, at) == {"day": "2026-02-01"}


def test_every_error_is_reported() -> None:
    """One line each."""
    with pytest.raises(ConfigError) as error:
        render_data({"a": "{{ x }}", "b": "{{ y }}"}, AT)
    assert [line[:7] for line in str(error.value).splitlines()] == ["data.a:", "data.b:"]


def test_data_given_to_a_run_is_plain() -> None:
    """What JSON cannot store is refused with its path; keys become text."""
    assert check_plain_data({"day": {1: [None, 2.5]}}) == {"day": {"1": [None, 2.5]}}
    assert parse_data(["at.day=3", "new='{{ x }}'"]) == {"at": {"day": 3}, "new": "{{ x }}"}
    with pytest.raises(ConfigError, match=r"data\.a\[0\]: nan cannot be stored as JSON"):
        parse_data(["a=[.nan]"])
