"""Uploads of exported folders, to a small hub on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")
PUSH = """
import os, sys
from pathlib import Path
from trial_core.checkpoint.weights.write_hf_folder import push
print(push(Path(sys.argv[1]), "someone/model", "Checkpoint 1", "own.json"))
os.environ["HF_TOKEN"] = "hf_bad"
push(Path(sys.argv[1]), "someone/model", "Checkpoint 2", "own.json")
"""


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub to create a repository and upload a folder."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token = "Bearer hf_good"
        self.created: list[Any] = []
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        self.server.objects[self.path.rpartition("/")[2]] = self.rfile.read(size)
        self._answer(200, {})

    def do_POST(self) -> None:
        hub = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != hub.token:
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer(200, {"url": f"{hub.url}/someone/model", "name": "someone/model"})
        elif "/preupload/" in self.path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/put/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append(value)
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
                else:
                    hub.files[value["path"]] = base64.b64decode(value["content"])
            url = f"{hub.url}/someone/model/commit/1"
            self._answer(200, {"commitUrl": url, "commitOid": "1", "success": True})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def test_a_folder_is_uploaded_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    """All files but one that stays arrive, large ones as objects; the error of a hub that refuses
    says what to check."""
    folder = tmp_path / "model"
    folder.mkdir()
    content = {"config.json": b"{}", "model.safetensors": b"0" * 1000}
    for name, each in content.items():
        (folder / name).write_bytes(each)
    (folder / "own.json").touch()
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_good", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", PUSH, str(folder)],
        env={**os.environ, **own, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert hub.files == content
    assert hub.created[0]["visibility"] == "private"
    assert [each["summary"] for each in hub.commits] == ["Checkpoint 1"]
    assert done.stdout.strip().startswith(f"{hub.url}/someone/model")
    assert "StorageError: cannot upload" in done.stderr
    assert "HF_TOKEN" in done.stderr
