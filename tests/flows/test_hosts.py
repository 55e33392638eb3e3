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
from tests.support.s3 import S3Server, ceph_gateway, moto_server
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.nodes.join_token import write_token

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.server]
PORT = 7655
DEADLINE_SECONDS = 180.0


@pytest.fixture
def storage(hosts: Hosts) -> Iterator[S3Server]:
    """An S3 server that the hosts reach."""
    with moto_server(DRIVER) as server:
        yield server


@pytest.fixture
def gateway(hosts: Hosts) -> Iterator[S3Server]:
    """An S3 server that the hosts reach, and that logs who asks for what."""
    with ceph_gateway(DRIVER) as server:
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


def results(here: Path, config: Any) -> list[Any]:
    """The batches that a run trains without a restart, and its metrics: on hosts, and on one."""
    assert config.max_restarts == 0
    alone = config.model_copy(update={"resources": toy_config(here).resources})
    done = [train(config), train(alone)]
    return [(each.batches_trained, each.validation_metrics) for each in done]


def keys_by_client(gateway: S3Server, method: str, bucket: str, saved: Manifest) -> Any:
    """The addresses that have stored (PUT) or fetched (GET) files of a checkpoint, and their keys.

    An earlier checkpoint may have stored some of them, and files with the same bytes have one key.
    """
    keys = {f"{bucket}/{file.key(saved.uuid)}": file.key(saved.uuid) for file in saved.files}
    found: dict[str, set[str]] = {}
    for request in gateway.requests():
        if request.method == method and request.url in keys:
            found.setdefault(request.client, set()).add(keys[request.url])
    return found


@pytest.mark.gateway
@pytest.mark.parametrize(
    ("trial", "common"),
    [
        ({"hyperparameters": {"zero_stage": 1}}, {"mp_rank_00_model_states.pt"}),
        ({"hyperparameters": {"zero_stage": 3}}, set()),
        (
            {"entrypoint": "parallel_trials:PipelineTrial", "hyperparameters": {"zero_stage": 1}},
            {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"},  # without the layers
        ),
    ],
    ids=["zero-1", "zero-3", "pipeline"],
)
def test_two_hosts_train_and_continue(
    here: Path,
    hosts: Hosts,
    gateway: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
    trial: dict[str, Any],
    common: set[str],
) -> None:
    """2 × 2 ranks. Each host stores its ranks' shards, and fetches those alone to continue.

    `common`: the model states that every rank reads.
    """
    config = on_hosts(here, gateway, 4, 8, **trial)
    bucket = config.checkpoint_storage.url
    start_agents(hosts, here, tmp_path_factory.mktemp("agents"), 2)
    result = train(config)
    assert result.batches_trained == 8
    saved = CheckpointStore(bucket, config.checkpoint_storage.options).list(result.trial)[-1]
    assert saved.topology.world_size == 4
    for agent in hosts.agents:
        assert agent.wait(60) == 0
    shards = [{f for f in saved.files if f.rank in own} for own in ({0, 1}, {2, 3})]
    stored = keys_by_client(gateway, "PUT", bucket, saved)
    assert sorted(stored) == [hosts.address(name) for name in hosts.names]
    new = {f.key(saved.uuid) for f in saved.files if not f.stored_at}
    own = [{f.key(saved.uuid) for f in shard} & new for shard in shards]
    assert sorted((each & new for each in stored.values()), key=sorted) == sorted(own, key=sorted)

    further = on_hosts(here, gateway, 4, 12, **trial, checkpoint_storage=config.checkpoint_storage)
    for name in hosts.names:
        folder = tmp_path_factory.mktemp("again") / name
        token = (here / "token").read_text()
        hosts.start_agent(name, f"tls://{DRIVER}:{PORT}", token, folder)
    assert train(further, trial=result.trial).batches_trained == 12
    fetched = keys_by_client(gateway, "GET", bucket, saved)
    assert sorted(fetched) == [hosts.address(name) for name in hosts.names]
    shared = {"latest", "zero_to_fp32.py", "zero_to_torch.py", "trialflow/resume.json"}
    shared |= {f"model0/{n}" for n in common}
    # Small, and compared or exported as a whole.
    whole = ("trialflow/fingerprints-", "export0/")
    read_by_all = {f for f in saved.files if f.path in shared or f.path.startswith(whole)}
    needed = [{f.key(saved.uuid) for f in shard | read_by_all} for shard in shards]
    assert sorted(fetched.values(), key=sorted) == sorted(needed, key=sorted)


@pytest.mark.parametrize("lost", [0, 0.05], ids=["slow", "slow-and-lossy"])
def test_a_bad_network_is_no_silence(
    here: Path,
    hosts: Hosts,
    storage: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
    lost: float,
) -> None:
    """A checkpoint fills each host's cable for longer than a node may be silent."""
    ballast = {"record": str(here), "ballast_mib": 3}  # 25 s on such a cable
    config = on_hosts(here, storage, 2, 60, hyperparameters=ballast, min_checkpoint_period=None)
    start_agents(hosts, here, tmp_path_factory.mktemp("agents"), 2)
    for name in hosts.names:
        hosts.slow_down(name, "1mbit")
        hosts.lose_packets(name, lost)
    bad, good = results(here, config)
    assert bad == good
    for name in hosts.names:
        sent_late, _ = hosts.packets(name, "tbf", "overlimits")
        assert sent_late > 1000
        assert all((count > 50) == (lost > 0) for count in hosts.packets(name, "clsact", "drops"))


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
