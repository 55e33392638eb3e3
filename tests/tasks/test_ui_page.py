"""Links to pages of Prefect's UI."""

from __future__ import annotations

import httpx
import pytest
from prefect.settings import PREFECT_UI_URL, temporary_settings

from tests.support.prefect import PrefectServer
from trialflow.tasks.ui_page import ui_page

NO_ANSWER = "http://127.0.0.1:9"


@pytest.mark.server
def test_the_newer_ui_of_a_server(prefect_server: PrefectServer) -> None:
    """The server opens it by default, so links lead there, those to a configured server, too."""
    with prefect_server.configured():
        assert ui_page("runs/flow-run/7") == f"{prefect_server.ui_url}/v2/runs/flow-run/7"


@pytest.mark.parametrize("told", ["<html>", "[]", "{}", '{"default_ui": "v1"}', None])
def test_a_server_that_opens_no_newer_ui(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    """An older server, Prefect Cloud, or one that does not answer: the only path that all have."""
    if told is not None:
        monkeypatch.setattr(httpx, "get", lambda *_, **options: httpx.Response(200, text=told))
    url = f"{NO_ANSWER}/{told}"
    with temporary_settings({PREFECT_UI_URL: url}):
        assert ui_page("runs") == f"{url}/runs"
