"""The notification that docs/guides/deploying.md shows, against a webhook on this machine."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from tests.support.prefect import PrefectServer
from tests.support.waiting import WAIT_SECONDS, ask

pytestmark = pytest.mark.server

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "deploying.md"


@pytest.fixture
def webhook() -> Iterator[tuple[str, queue.Queue[bytes]]]:
    """A webhook's address, and the bodies that it receives."""
    received: queue.Queue[bytes] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", received
        server.shutdown()


def test_a_failed_run_is_posted(
    prefect_server: PrefectServer, webhook: tuple[str, queue.Queue[bytes]]
) -> None:
    """The document's program works as it stands, for our runs alone."""
    url, received = webhook
    (program,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.M)
    program = re.sub(r'^URL = ".*"$', f'URL = "{url}"', program, flags=re.M)
    with prefect_server.configured(), get_client(sync_client=True) as client:
        before = {each.id for each in client.read_automations()}
        exec(compile(program, str(DOCUMENT), "exec"), {})
        (created,) = {each.id for each in client.read_automations()} - before
        try:
            for name, tags in (("theirs", []), ("ours", ["trialflow"])):
                run = ask(
                    prefect_server,
                    "flow_runs/",
                    {"flow_id": str(client.create_flow_from_name("f")), "name": name, "tags": tags},
                )
                state = {"state": {"type": "FAILED", "name": "Failed"}, "force": True}
                ask(prefect_server, f"flow_runs/{run['id']}/set_state", state)
            text = json.loads(received.get(timeout=WAIT_SECONDS))["text"]
            assert text.startswith("ours: Failed ")
            assert received.empty()
        finally:
            client.delete_automation(created)
