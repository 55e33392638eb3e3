"""Refuses requests that pages of other sites send to a server on this machine.

A page that the user visits can send requests to 127.0.0.1. Three checks keep it out:

- Host: a name of another site that resolves to 127.0.0.1 is not the server's (DNS rebinding).
- Origin: browsers name the page that sends a request, and it must be the server's own.
- The password, which Prefect checks. Prefect's UI keeps it in the browser's local storage, so no
  browser adds it to the requests of other pages. A cookie would go to all ports of this machine.

No page may show the UI in a frame, where a click could be meant for something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse
from starlette.websockets import WebSocketClose

from trialflow.flows.server.server_login import LOGIN_PATH

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORBIDDEN = 403
# Stores the password of the link's fragment, if it is right, where Prefect's UI looks for it. The
# page that opens then is always one of this server: its path is appended to the origin.
LOGIN_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>trialflow</title>
<p>Opening Prefect…</p>
<script type="module">
const page = location.origin + location.pathname.slice(%r.length) + location.search;
const password = btoa(decodeURIComponent(location.hash.slice(1)));
const headers = {Authorization: `Basic ${password}`};
if ((await fetch("/api/admin/version", {headers})).ok) {
    localStorage.setItem("prefect-password", password);
}
location.replace(page);
</script>
"""


class RequestGuard:
    """An ASGI application in front of Prefect's, whose only address is `own_url`."""

    def __init__(self, app: ASGIApp, own_url: str) -> None:
        self._app = app
        self._own_url = own_url
        self._own_host = urlsplit(own_url).netloc

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif problem := self._problem(Headers(scope=scope)):
            await _refuse(problem, scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, _unframed(send))
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(f"{LOGIN_PATH}/"):
            await HTMLResponse(LOGIN_PAGE % LOGIN_PATH)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        """Return why a request is refused, or None if it is not."""
        host, origins = headers.get("host"), headers.getlist("origin")
        if host != self._own_host:
            return f"the request is for the host {host}, not {self._own_host}: use {self._own_url}"
        if any(origin != self._own_url for origin in origins):
            return f"the request comes from a page of {', '.join(origins)}, not {self._own_url}"
        return None


async def _refuse(problem: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocketClose(reason=problem)(scope, receive, send)
    else:
        await JSONResponse({"detail": problem}, FORBIDDEN)(scope, receive, send)


def _unframed(send: Send) -> Send:
    """`send`, with a header by which browsers do not show the response in a frame."""

    async def send_unframed(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Content-Security-Policy"] = "frame-ancestors 'none'"
        await send(message)

    return send_unframed


def guarded_prefect() -> ASGIApp:
    """Prefect's application behind the guard. Its address is the setting PREFECT_UI_URL."""
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    own_url = get_current_settings().ui_url
    if own_url is None:
        raise ValueError("PREFECT_UI_URL is not set: expected the server's address")
    return RequestGuard(create_app(), own_url)
