"""Runs on two hosts of a network, which share no folder: only the object storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.hosts import DRIVER, Hosts, new_hosts
from tests.support.s3 import S3Server, moto_server
from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.nodes.join_token import write_token

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.server]
PORT = 7655
DEADLINE_SECONDS = 180.0


@pytest.fixture
def storage(hosts: Hosts) -> Iterator[S3Server]:
    """An S3 server that the hosts reach."""
    with moto_server(DRIVER) as server:
        yield server


@pytest.fixture
def hosts(here: Path) -> Iterator[Hosts]:
    """A network whose hosts do not see this test's folder."""
    with new_hosts(here) as made:
        yield made


def on_hosts(here: Path, storage: S3Server, slots: int, batches: int, **changes: Any) -> Any:
    """An experiment on two hosts that saves every 4 batches."""
    resources = {
        "slots_per_trial": slots, "slots_per_node": slots // 2, "engine": "join",
        "channel": {"bind": DRIVER, "ports": PORT, "token_file": str(here / "token")},
    }  # fmt: skip
    options = storage.options
    fields: dict[str, Any] = {
        "scheduling_unit": 4,
        "min_checkpoint_period": {"batches": 4},
        "checkpoint_storage": {"url": storage.new_bucket(), "options": options},
    }
    return toy_config(here, batches, resources=resources, **{**fields, **changes})


def start_agents(hosts: Hosts, here: Path, tmp: Path, count: int) -> None:
    token = write_token(here / "token")
    for _ in range(count):
        name = hosts.add()
        hosts.start_agent(name, f"tls://{DRIVER}:{PORT}", token, tmp / name)


@pytest.mark.parametrize(
    "trial",
    [
        {"hyperparameters": {"zero_stage": 1}},
        {"hyperparameters": {"zero_stage": 3}},
        {"entrypoint": "parallel_trials:PipelineTrial", "hyperparameters": {"zero_stage": 1}},
    ],
    ids=["zero-1", "zero-3", "pipeline"],
)
def test_two_hosts_train_and_continue(
    here: Path,
    hosts: Hosts,
    storage: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
    trial: dict[str, Any],
) -> None:
    """2 × 2 ranks. Each host stores its ranks' shards, and another run restores them."""
    config = on_hosts(here, storage, 4, 8, **trial)
    start_agents(hosts, here, tmp_path_factory.mktemp("agents"), 2)
    result = train(config)
    assert result.batches_trained == 8
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    manifest = store.list(result.trial)[-1]
    assert {file.rank for file in manifest.files} == {0, 1, 2, 3}
    assert manifest.topology.world_size == 4
    for agent in hosts.agents:
        assert agent.wait(60) == 0

    further = on_hosts(here, storage, 4, 12, **trial, checkpoint_storage=config.checkpoint_storage)
    for name in hosts.names:
        folder = tmp_path_factory.mktemp("again") / name
        token = (here / "token").read_text()
        hosts.start_agent(name, f"tls://{DRIVER}:{PORT}", token, folder)
    assert train(further, trial=result.trial).batches_trained == 12


def test_a_cut_cable_costs_only_that_host(
    here: Path,
    hosts: Hosts,
    storage: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It is named, a third host takes its place, and its own ranks end without the driver."""
    config = on_hosts(here, storage, 2, 300, max_restarts=1)
    start_agents(hosts, here, tmp_path_factory.mktemp("agents"), 3)
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    cut: list[str] = []

    def cut_after_a_checkpoint() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not store.list() and time.monotonic() < deadline:
            time.sleep(0.05)
        cut.append(next(name for name in hosts.names if hosts.ranks(name)))
        hosts.cut(cut[0])

    cutting = threading.Thread(target=cut_after_a_checkpoint)
    cutting.start()
    result = train(config)
    cutting.join()
    assert result.batches_trained == 300
    report = Path(result.report_path).read_text()
    assert "was lost with its node: no sign of life for 20 s, the last at " in report
    victim = hosts.agents[hosts.names.index(cut[0])]
    assert victim.wait(DEADLINE_SECONDS) == 1
    assert hosts.ranks(cut[0]) == []
