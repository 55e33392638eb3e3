"""A page of another site can neither read from a server that trialflow starts nor start a run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from tests.support.browser import Browser, chromium
from tests.support.prefect import isolated, of_prepared, prepared
from tests.support.processes import listening_beyond_loopback
from trial_core.errors import ConfigError
from trialflow.deployments.cli import doctor
from trialflow.flows.server import server_login
from trialflow.flows.server.embedded_server import (
    PrefectApi,
    configured_api_problem,
    flush,
    prefect_api,
)
from trialflow.flows.server.prefect_settings import environment, use_stored_password
from trialflow.flows.server.request_guard import RequestGuard
from trialflow.flows.server.server_login import ServerLogin, find_login, password_path

OWN = "http://127.0.0.1:4200"
ELSEWHERE = "http://site.example"
REACHED = 4000  # closes a WebSocket that the guard lets through
# What a page of another site could try, by name. Each step says what it got.
ATTACK = """<!doctype html><body><script type="module">
const api = %s;
const got = {};
async function attempt(name, step) {
    try { got[name] = await step(); } catch (error) { got[name] = "refused"; }
}
const json = {"Content-Type": "application/json"}, wanted = JSON.stringify({name: "stolen"});
await attempt("read", async () => (await fetch(`${api}/admin/version`)).text());
await attempt("create", async () =>
    (await fetch(`${api}/flows/`, {method: "POST", headers: json, body: wanted})).text());
await attempt("create unseen", async () =>
    (await fetch(`${api}/flows/`, {method: "POST", mode: "no-cors", body: wanted})).type);
await attempt("with the browser's cookies", async () =>
    (await fetch(`${api}/admin/version`, {credentials: "include"})).text());
await attempt("socket", () => new Promise((done, fail) => {
    const socket = new WebSocket(api.replace("http", "ws") + "/events/out", "prefect");
    socket.onopen = () => done("open"); socket.onerror = fail;
}));
document.body.innerText = JSON.stringify(got);
</script>"""


def messages(kind: str, headers: dict[str, str]) -> list[Message]:
    """What the guard and the application behind it send for a request or a WebSocket."""
    sent: list[Message] = []
    app = PlainTextResponse("reached")

    async def reached(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if kind == "http" else WebSocketClose(REACHED))(scope, receive, send)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": "POST", "path": "/api/flows/filter", "headers": raw}
    asyncio.run(RequestGuard(reached, OWN)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ELSEWHERE},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Host": "site.example:4200"},
        {"Host": "127.0.0.1:4201"},
        {"Host": "site.example:4200", "Origin": "http://site.example:4200"},
    ],
)
def test_a_request_of_another_site_is_refused(headers: dict[str, str]) -> None:
    """Its Host or its Origin is not the server's. The answer says what was expected."""
    headers = {"Host": "127.0.0.1:4200", **headers}
    start, body = messages("http", headers)
    assert start["status"] == 403
    assert b"127.0.0.1:4200" in body["body"]
    assert messages("websocket", headers)[0]["code"] != REACHED


@pytest.mark.parametrize("headers", [{}, {"Origin": OWN}])
def test_a_request_of_the_servers_own_page_passes(headers: dict[str, str]) -> None:
    """So does a request of a program, which has no Origin. No page may show it in a frame."""
    headers = {"Host": "127.0.0.1:4200", **headers}
    start, body = messages("http", headers)
    assert body["body"] == b"reached"
    assert (b"content-security-policy", b"frame-ancestors 'none'") in start["headers"]
    assert messages("websocket", headers)[0]["code"] == REACHED


def test_a_link_holds_the_password_in_its_fragment(tmp_path: Path) -> None:
    """So it is not sent. The page's path follows the path of the login."""
    login = ServerLogin("me:a b/#", tmp_path)
    assert (
        login.link(f"{OWN}/v2/runs?tab=Logs") == f"{OWN}/trialflow/v2/runs?tab=Logs#me:a%20b%2F%23"
    )
    assert login.link(OWN) == f"{OWN}/trialflow/#me:a%20b%2F%23"
    assert "a b" not in repr(login)


def test_the_password_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    """Its file may have any mode; the new one is private."""
    login = ServerLogin("me:new", tmp_path / "file")
    login.path.write_text("a much longer password")
    login.path.chmod(0o666)
    with login.stored():
        assert login.path.read_text() == "me:new\n"
        assert login.path.stat().st_mode & 0o777 == 0o600
    assert not login.path.exists()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    """An embedded server, in use."""
    home = prepared(tmp_path_factory.mktemp("prefect-home"))
    with environment(of_prepared(home)), prefect_api() as api:
        yield api


def login(api: PrefectApi) -> ServerLogin:
    assert api.login is not None
    return api.login


@pytest.mark.server
def test_only_the_user_gets_an_answer(api: PrefectApi) -> None:
    """Other sites and other users are refused. A flow of this process needs nothing."""

    def ask(auth: httpx.BasicAuth | None, **headers: str) -> int:
        url, body = f"{api.api_url}/flows/", {"name": "stolen"}
        return httpx.post(url, json=body, headers=headers, auth=auth).status_code

    user, _, password = login(api).password.partition(":")
    right = httpx.BasicAuth(user, password)
    assert ask(None) == 401
    assert ask(httpx.BasicAuth(user, "guess")) == 401
    assert ask(right, Origin=ELSEWHERE) == 403
    assert ask(right, Host="site.example") == 403

    @flow(name="mine")
    def mine() -> int:
        return 17

    assert mine() == 17
    flush()
    with get_client(sync_client=True) as client:
        assert [each.name for each in client.read_flows()] == ["mine"]


@pytest.mark.server
def test_the_password_is_this_users_alone(api: PrefectApi) -> None:
    """It is in a file that only the user can read; in no command line, no log and no setting that
    runs or the database keep. Other machines cannot ask for it."""
    found, port = login(api), urlsplit(str(api.ui_url)).port
    children = psutil.Process().children(recursive=True)
    beyond = listening_beyond_loopback([each.pid for each in children])
    assert [each for each in beyond if each.endswith(f":{port}")] == []
    assert found.path.stat().st_mode & 0o777 == 0o600
    for process in children:
        assert found.password not in " ".join(process.cmdline())
    secret = found.password.partition(":")[2].encode()
    others = [
        path for path in found.path.parent.rglob("*") if path.is_file() and path != found.path
    ]
    assert {"prefect.db", "trialflow-server.log"} <= {path.name for path in others}
    assert [path for path in others if secret in path.read_bytes()] == []


@pytest.mark.server
def test_another_command_finds_the_password(api: PrefectApi) -> None:
    """The address alone is enough for a command of trialflow. A wrong password is named as such."""
    with environment({"PREFECT_API_AUTH_STRING": "me:guess"}):
        assert "asks for another password" in str(configured_api_problem())
    with environment({"PREFECT_API_AUTH_STRING": ""}):
        assert "asks for another password" in str(configured_api_problem())
        use_stored_password()
        assert configured_api_problem() is None


def test_a_password_goes_to_this_users_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was killed leaves its file, and its port to others: then no command of
    trialflow uses the address, and the error says what to do."""
    other_user = os.geteuid() + 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        api_url = f"http://127.0.0.1:{port}/api"
        password_path(tmp_path, port).write_text("me:secret\n")
        assert find_login(tmp_path, api_url).password == "me:secret"
        for given in ("", "me:secret"):
            variables = {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": given}
            with environment({**isolated(tmp_path), **variables}), monkeypatch.context() as patched:
                patched.setattr(os, "geteuid", lambda: other_user)
                with pytest.raises(ConfigError, match=r"no process of this user .*unset PREFECT"):
                    use_stored_password()
                assert "no process of this user" in str(doctor.prefect_server())
        peer = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
    with peer, accepted, pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        find_login(tmp_path, api_url)  # a connection at this port is no server


def test_another_password_than_the_stored_one_is_the_users_own(tmp_path: Path) -> None:
    """The file of a server that was killed is not in the way of another server on its port."""
    password_path(tmp_path, 4711).write_text("me:secret\n")
    variables = {
        "PREFECT_API_URL": "http://127.0.0.1:4711/api", "PREFECT_API_AUTH_STRING": "me:other",
    }  # fmt: skip
    with environment({**isolated(tmp_path), **variables}):
        use_stored_password()
        assert os.environ["PREFECT_API_AUTH_STRING"] == "me:other"


def test_an_address_that_is_no_url(tmp_path: Path) -> None:
    """Is named before anything is sent there."""
    with (
        environment({**isolated(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:99999/api"}),
        pytest.raises(ConfigError, match=r"PREFECT_API_URL: .* is no URL"),
    ):
        use_stored_password()


def test_a_password_is_not_sent_where_owners_of_ports_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some containers have no list of sockets."""
    monkeypatch.setattr(server_login, "LISTENERS", tmp_path / "none")
    password_path(tmp_path, 4711).write_text("me:secret\n")
    with pytest.raises(ConfigError, match=r"cannot be told.*set PREFECT_API_AUTH_STRING"):
        find_login(tmp_path, "http://127.0.0.1:4711/api")


@contextmanager
def page(html: str) -> Iterator[str]:
    """The address of a web page on another port of this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser, with a new profile."""
    with chromium() as browser:
        yield browser


@pytest.mark.long
@pytest.mark.server
@pytest.mark.browser
@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_printed_link_logs_in(api: PrefectApi, browser: Browser, ui: str) -> None:
    """It opens the UI, which shows the server's flows. The password is not in the address."""
    with get_client(sync_client=True) as client:
        client.create_flow_from_name("shown-in-the-ui")
    browser.open(login(api).link(f"{api.ui_url}{ui}/flows"), "shown-in-the-ui")
    assert login(api).password not in browser._driver.current_url


@pytest.mark.long
@pytest.mark.server
@pytest.mark.browser
def test_a_page_of_another_site_gets_nothing(api: PrefectApi, browser: Browser) -> None:
    """Even while the user is logged in: it can read nothing, create nothing and show no frame."""
    browser.open(login(api).link(f"{api.ui_url}/v2/flows"), "Flows")
    with page(ATTACK % json.dumps(api.api_url)) as other:
        browser.open(other, "socket")
        got = json.loads(browser.text)
    assert got == {**dict.fromkeys(got, "refused"), "create unseen": "opaque"}
    with get_client(sync_client=True) as client:
        assert "stolen" not in [each.name for each in client.read_flows()]
    with page(f'<p>framed</p><iframe src="{api.ui_url}/v2/flows"></iframe>') as other:
        browser.open(other, "framed")
        browser._driver.switch_to.frame(0)
        assert "Flows" not in browser.text
        browser._driver.switch_to.default_content()


@pytest.mark.long
@pytest.mark.server
@pytest.mark.browser
def test_another_name_of_this_machine_is_refused(api: PrefectApi, browser: Browser) -> None:
    """A name of another site that resolves to 127.0.0.1 (browsers resolve *.localhost so)."""
    address = str(api.ui_url).replace("127.0.0.1", "site.localhost")
    browser.open(f"{address}/api/health", f"use {api.ui_url}")
