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
from trial_core.errors import ConfigError
from trial_core.nodes.join_token import write_token
from trialflow.flows.train import TrialResult

pytestmark = [pytest.mark.slots, pytest.mark.server]

END_SECONDS = 60.0


def on_nodes(here: Path, batches: int, **changes: Any) -> Any:
    """An experiment whose two ranks are on two nodes, saved every 4 batches."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "engine": "join", "max_wait_seconds": 120,
        "channel": {"bind": LOOPBACK, "ports": port, "token_file": str(here / "token")},
    }  # fmt: skip
    fields: dict[str, Any] = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}}
    resources.update(changes.pop("resources", {}))
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

    The run resumes from the last checkpoint, of which each node stored its shards. No process is
    left.
    """
    breaks = breaking(here, "lose node", 13, do_rank=1)
    config = on_nodes(here, 16, max_restarts=1, hyperparameters=breaks)
    agents = nodes(config, 3)
    result = train(config)
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 1)]
    assert seen[:13] == list(range(13))
    assert seen[13:] in (list(range(12, 16)), list(range(8, 16)))
    assert "was lost with its node: its agent has closed the connection" in caplog.text
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [-9, 0, 0]
    manifest = CheckpointStore(config.checkpoint_storage.url).list()[-1]
    assert {file.rank for file in manifest.files} == {0, 1}
    assert ranks_in(here) == []
    logs = Path(result.run_dir) / "logs"
    assert {log.name for log in logs.iterdir()} >= {"rank-0.log", "rank-1.log"}


def test_what_cannot_run_on_several_machines_is_refused(here: Path) -> None:
    """Before the run waits for a node."""
    with pytest.raises(ConfigError, match="slots_per_trial: auto counts the accelerators of this"):
        train(on_nodes(here, 4, resources={"slots_per_trial": "auto"}))
    with pytest.raises(ConfigError, match="memory:// is seen by this process alone"):
        train(on_nodes(here, 4, checkpoint_storage="memory://"))


def ranks_in(folder: Path) -> list[int]:
    """The ranks that run below a folder, whatever has started them."""
    return [
        each.pid
        for each in psutil.process_iter()
        if "trialflow: rank" in _title(each) and _is_in(each, folder)
    ]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False
