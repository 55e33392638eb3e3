"""`trialflow mcp`, used by the package's own client over stdin and stdout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from anyio.from_thread import start_blocking_portal

from tests.deployments.conftest import store_two
from tests.support.cli import TRIALFLOW, environment_in, trialflow_here, write_experiment
from tests.support.json_types import check_json
from tests.support.prefect import isolated, prepared
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines
from tests.support.waiting import until
from trialflow.deployments.cli.main import main
from trialflow.flows.server.prefect_settings import environment

if TYPE_CHECKING:
    from mcp import Client

pytestmark = pytest.mark.xdist_group("mcp")  # one process imports its client
ENDLESS = 10**6
READING = ["compare", "list", "logs", "show"]
WRITING = ["cancel", "promote", "resume", "start", "suspend"]


class Tools:
    """The tools of a server; a call returns the result, or raises what the tool says."""

    def __init__(self, portal: Any, client: Client) -> None:
        self.portal, self.client = portal, client

    def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        answer = self.portal.call(self.client.call_tool, tool, arguments)
        text = "".join(each.text for each in answer.content)
        assert not answer.is_error, text
        assert answer.structured_content == json.loads(text)
        return check_json(answer.structured_content)

    def refusal(self, tool: str, /, **arguments: Any) -> str:
        answer = self.portal.call(self.client.call_tool, tool, arguments)
        assert answer.is_error
        return "".join(each.text for each in answer.content)

    @property
    def annotations(self) -> dict[str, bool]:
        """Whether each tool says that it only reads."""
        listed = self.portal.call(self.client.list_tools).tools
        return {each.name: each.annotations.read_only_hint for each in listed}


@contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[Tools]:
    """`trialflow mcp` in a folder."""
    from mcp import Client, StdioServerParameters, stdio_client  # takes a second

    program, *words = TRIALFLOW
    environment = environment_in(folder, variables)
    with (folder / "mcp.log").open("w") as log, start_blocking_portal() as portal:
        server = StdioServerParameters(
            command=program, args=[*words, "mcp", *options], env=environment, cwd=folder
        )
        client = Client(stdio_client(server, errlog=log))
        with portal.wrap_async_context_manager(client):
            yield Tools(portal, client)


@contextmanager
def serving_here(folder: Path, *options: str, **variables: str) -> Iterator[Tools]:
    """The server of `trialflow mcp` in a folder, without its process."""
    from mcp import Client
    from mcp.server import MCPServer

    with (
        environment({"TRIALFLOW_HOME": str(folder / "home"), **variables}),
        chdir(folder),
        patch.object(MCPServer, "run", autospec=True) as run,
        start_blocking_portal() as portal,
    ):
        assert main(["mcp", *options]) == 0
        server, _ = run.call_args.args
        client = Client(server)
        with portal.wrap_async_context_manager(client):
            yield Tools(portal, client)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tools, Path]]:
    """`trialflow mcp` on a storage with two trials, of which one has a log here; and its folder."""
    folder = tmp_path_factory.mktemp("reading")
    store_two(folder)
    for trial in ("gpt-7", "elsewhere-1"):
        (folder / "home" / trial / "logs").mkdir(parents=True)
        (folder / "home" / trial / "logs" / "rank-0.log").write_text("one\ntwo\nthree\n")
    with serving(folder, "--storage", str(folder / "storage"), PREFECT_API_URL="") as tools:
        yield tools, folder
    assert "Traceback" not in (folder / "mcp.log").read_text()


def test_what_is_stored_can_be_read(reading: tuple[Tools, Path]) -> None:
    """As the commands print it with --json; nothing that changes something is offered."""
    tools, folder = reading
    assert tools.annotations == dict.fromkeys(READING, True)
    listed = trialflow_here(folder, "runs", "list", "--json", "--storage", str(folder / "storage"))
    assert tools.call("list") == check_json(json.loads(listed.stdout))
    assert len(tools.call("list", what="checkpoints")["checkpoints"]) == 2
    assert tools.call("show", name="aaaaaaab", what="checkpoint")["manifest"]["trial"] == "gpt-11"
    assert tools.call("compare", trials=["gpt-7", "gpt-11"])["results"]["batches"] == [7, 11]
    assert tools.call("logs", trial="gpt-7", lines=2)["text"] == "two\nthree\n"
    assert "no trial elsewhere-1" in tools.refusal("logs", trial="elsewhere-1")


def test_a_mistake_is_told(reading: tuple[Tools, Path]) -> None:
    """With what to do, and without a traceback; the server serves on."""
    tools, folder = reading
    assert "but 2: gpt-11, gpt-7" in tools.refusal("show", name="gpt")
    assert "begins with 'zzz'" in tools.refusal("show", name="zzz", what="checkpoint")
    assert "not a valid model name" in tools.refusal("show", name="../x", what="model")
    assert "Unknown tool" in tools.refusal("cancel", trial="gpt-7")
    assert len(tools.call("list")["trials"]) == 2
    assert "Traceback" not in (folder / "mcp.log").read_text()


def test_fields_that_choose_code_or_storage_cannot_be_set(tmp_path: Path) -> None:
    """Also with --allow-writes: a text that a tool has read may ask for it."""
    write_experiment(tmp_path)
    variables = {**isolated(tmp_path / "prefect"), "PREFECT_API_URL": ""}
    with serving_here(tmp_path, "--allow-writes", **variables) as tools:
        assert sorted(name for name, reads in tools.annotations.items() if not reads) == WRITING
        for field in ("entrypoint", "code", "checkpoint_storage.url", "name=x,entrypoint"):
            assert "cannot be set here" in tools.refusal("start", settings={field: "x"})
        assert "run `trialflow up`" in tools.refusal("start", settings={"hyperparameters.lr": 0.1})


@contextmanager
def services(folder: Path) -> Iterator[dict[str, Any]]:
    """`trialflow up --json`: what it prints once it serves."""
    environment = environment_in(folder, isolated(prepared(folder / "prefect")))
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            [*TRIALFLOW, "up", "--json", "--port", "0"],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=log, text=True,
        )  # fmt: skip
    started: list[int] = []
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, (folder / "up.log").read_text()
            text += line if line != "}\n" else "}\n"
        yield check_json(json.loads(text))
        started = descendants(process.pid)
    finally:
        process.terminate()
        rest, _ = process.communicate()
        assert wait_until_gone(started, 15) == []
    assert rest == "", "stdout is for JSON alone"


@pytest.mark.long
@pytest.mark.server
@pytest.mark.slots
def test_a_run_from_its_start_to_a_champion(tmp_path: Path) -> None:
    """On a server and a worker of `trialflow up`: started, suspended, resumed, cancelled, and its
    checkpoint promoted."""
    write_experiment(
        tmp_path, scheduling_unit=ENDLESS, hyperparameters={"record": str(tmp_path), "lr": 0.5},
        searcher={"metric": "loss", "max_length": {"batches": 8}},
    )  # fmt: skip
    home = isolated(tmp_path / "prefect")
    with services(tmp_path), serving(tmp_path, "--allow-writes", **home) as tools:
        settings = {"hyperparameters.lr": 0.25, "searcher.max_length.batches": ENDLESS}
        trial = tools.call("start", settings=settings)["trial"]
        until(lambda: lines(tmp_path, "samples", 0), "training")
        tools.call("suspend", trial=trial)
        until(lambda: tools.call("list")["trials"], "a checkpoint")
        (saved,) = tools.call("list")["trials"]
        assert (saved["trial"], saved["hyperparameters"]["lr"]) == (trial, 0.25)
        assert tools.call("logs", trial=trial)["trial"] == trial
        asked = tools.call("resume", trial=trial)
        assert (asked["trial"], asked["message"][:12]) == (trial, "is scheduled")
        assert tools.call("cancel", trial=trial)["flow_run_id"] == asked["flow_run_id"]
        best = tools.call("list", what="checkpoints")["checkpoints"][0]["uuid"]
        assert tools.call("promote", model="toy", checkpoint=best, why="a test")["champion"] == 1
        assert tools.call("list", what="models")["models"][0]["checkpoint"] == best
