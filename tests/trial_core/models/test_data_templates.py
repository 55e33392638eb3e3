"""Data with templates of the scheduled time."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from trial_core.errors import ConfigError
from trial_core.models.data_templates import checked, merged, rendered

AT = datetime(2026, 3, 1, 3, 30, tzinfo=timezone.utc)


def test_texts_are_rendered_however_deep_they_lie() -> None:
    """All else stays as it is, keys and other people's line ends among it."""
    data = {
        "begin": "{{ (scheduled_time - timedelta(days=7)).date() }}",
        "files": [{"path": "s3://b/{{ scheduled_time.strftime('%Y/%m') }}\n"}, 3, None, True],
        "{{ key }}": "no template: {x}\r\n",
    }
    assert rendered(data, AT) == {
        "begin": "2026-02-22",
        "files": [{"path": "s3://b/2026/03\n"}, 3, None, True],
        "{{ key }}": "no template: {x}\r\n",
    }


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ tomorrow }}", "'tomorrow' is undefined"),
        ("{{ scheduled_time.dat() }}", "no attribute 'dat'"),
        ("{{ scheduled_time ", "unexpected end"),
        ("{% for %}", "Expected"),
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
def test_a_template_that_cannot_be_rendered(template: str, said: str) -> None:
    """Its key, the template, what is wrong with it and what there is instead."""
    with pytest.raises(ConfigError) as error:
        rendered({"window": [{"end": template}]}, AT)
    line = str(error.value)
    assert line.startswith("data.window[0].end: the template ")
    assert said in line
    assert line.endswith("templates know scheduled_time (a datetime, UTC), timedelta and ZoneInfo")


def test_the_date_is_that_of_a_place_if_asked_for() -> None:
    """Half past eleven at night in UTC is the next day in Berlin."""
    day = "{{ scheduled_time.astimezone(ZoneInfo('Europe/Berlin')).date() }}"
    at = datetime(2026, 1, 31, 23, 30, tzinfo=timezone.utc)
    assert rendered({"day": day}, at) == {"day": "2026-02-01"}


def test_every_mistake_is_named() -> None:
    """One line each."""
    with pytest.raises(ConfigError) as error:
        rendered({"a": "{{ x }}", "b": "{{ y }}"}, AT)
    assert [line[:7] for line in str(error.value).splitlines()] == ["data.a:", "data.b:"]


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ],
)
def test_what_arrived_goes_over_what_is_there(base: Any, over: Any, expected: Any) -> None:
    """Mappings are merged, all else is replaced; neither is changed."""
    before = repr((base, over))
    assert merged(base, over) == expected
    assert repr((base, over)) == before


def test_what_a_run_is_given_is_plain_data() -> None:
    """What JSON cannot carry is refused, with its place; keys become text, as in JSON."""
    assert checked({"day": {1: [None, 2.5]}}) == {"day": {"1": [None, 2.5]}}
    with pytest.raises(ConfigError, match=r"data\.a\[0\]: nan cannot be stored as JSON"):
        checked({"a": [float("nan")]})
