"""Links to pages of Prefect's UI: all of them lead to the UI that the server opens by default.

A server may have two, the newer one below ``/v2``; only that one draws a report's curves.
"""

from __future__ import annotations

from functools import cache

import httpx
from prefect.settings import get_current_settings

TIMEOUT_SECONDS = 2.0


def ui_page(path: str) -> str | None:
    """Return the address of a page, such as ``runs/flow-run/ID``, or None if no UI is known."""
    ui_url = get_current_settings().ui_url
    return f"{_default_ui(ui_url.rstrip('/'))}/{path}" if ui_url else None


@cache
def _default_ui(ui_url: str) -> str:
    try:
        told = httpx.get(f"{ui_url}/ui-settings", timeout=TIMEOUT_SECONDS).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):  # Prefect Cloud answers with a page
        return ui_url
    return f"{ui_url}/v2" if isinstance(told, dict) and told.get("default_ui") == "v2" else ui_url
