"""A run whose ranks are on several nodes: each is an agent here, with its own folder."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.flow import breaking, train
from tests.support.nodes import LOOPBACK, Agents
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.nodes.join_token import write_token
from trialflow.flows.train import TrialResult

JOIN_SECONDS = 60.0


def on_nodes(here: Path, batches: int, **changes: Any) -> Any:
    """An experiment whose two ranks are on two nodes."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "engine": "join",
        "channel": {"bind": LOOPBACK, "ports": port, "token_file": str(here / "token")},
    }  # fmt: skip
    fields: dict[str, Any] = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}}
    return toy_config(here, batches, resources=resources, **{**fields, **changes})


@pytest.fixture
def nodes(here: Path) -> Iterator[Callable[[Any, int], Agents]]:
    """Starts as many agents for a run; they wait for its driver."""
    with Agents(here / "nodes") as agents:

        def start(config: Any, count: int) -> Agents:
            token = write_token(here / "token")
            for _ in range(count):
                agents.start(f"tls://{LOOPBACK}:{config.resources.channel.ports}", token)
            return agents

        yield start


def test_a_lost_node_is_replaced(
    here: Path, nodes: Callable[[Any, int], Agents], caplog: pytest.LogCaptureFixture
) -> None:
    """One of two nodes is killed at batch 13, and a third one takes its place.

    The other node keeps its agent and the interpreter from which ranks are forked. The run resumes
    from the last checkpoint, and no process is left.
    """
    breaks = breaking(here, "lose node", 13, do_rank=1)
    config = on_nodes(here, 16, max_restarts=1, hyperparameters=breaks)
    agents = nodes(config, 3)
    result = train(config)
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 0)]
    resumed_at = int(seen[len(list(range(13)))]) if 13 not in seen[:14] else int(seen[14])
    assert resumed_at in (8, 12)
    assert "was lost with its node: its agent has closed the connection" in caplog.text
    ended = sorted(agent.wait(JOIN_SECONDS) for agent in agents.started)
    assert ended == [-9, 0, 0]
    manifests = CheckpointStore(config.checkpoint_storage.url).list()
    assert {file.rank for file in manifests[-1].files} == {0, 1}
    assert [
        p for p in psutil.process_iter() if "trialflow: rank" in _title(p) and _here(p, here)
    ] == []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _here(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False
