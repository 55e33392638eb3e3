"""A block whose requests are not repeated."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    Settings,
    temporary_settings,
)

from trialflow.tasks.client_retries import client_retries


def test_only_the_retries_change_and_no_setting_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run enters the block every few seconds, beside its ranks: it must cost next to nothing."""
    before = PREFECT_CLIENT_MAX_RETRIES.value()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):

        def read_again(*_: Any, **__: Any) -> None:
            raise AssertionError("settings were read again")

        monkeypatch.setattr(Settings, "__init__", read_again)
        with client_retries(0):
            assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
            assert PREFECT_API_URL.value() == "http://127.0.0.1:9/api"
            with client_retries(2):
                assert PREFECT_CLIENT_MAX_RETRIES.value() == 2
        assert PREFECT_CLIENT_MAX_RETRIES.value() == before
