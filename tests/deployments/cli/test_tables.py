"""Times in tables."""

from __future__ import annotations

import time

import pytest

from trialflow.deployments.cli.tables import local_time


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
