"""Times in tables, and JSON."""

from __future__ import annotations

import json
import time

import pytest

from trialflow.deployments.cli.tables import local_time, print_json


@pytest.mark.parametrize(
    ("zone", "at"),
    [
        ("America/Sao_Paulo", "0001-01-01T00:00:00Z"),
        ("Asia/Tokyo", "9999-12-31T23:59:59Z"),
        ("UTC", "2031-13-41T25:61:61Z"),
    ],
)
def test_a_time_that_no_clock_shows_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, zone: str, at: str
) -> None:
    """It may be stored; the local time zone has no such date."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", zone)
        time.tzset()
        shown = local_time(at)
    time.tzset()
    assert shown == at


def test_json_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """Stored texts may have them, and a terminal would obey."""
    value = {"by": "\x1b[31m \x7f \x9b31m é"}
    print_json(value)
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value
