"""Runs wait for the GPUs of a concurrency limit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import Abort, ObjectNotFound
from prefect.flow_engine import run_flow

import trial_core.processes.slots.device_locks
from tests.support.gpus import fake_gpus
from tests.support.prefect import PrefectServer, isolated
from tests.support.slots import toy_config
from tests.support.waiting import until
from trial_core.config import ExperimentConfig
from trial_core.errors import LaunchError
from trial_core.processes.slots.device_locks import reserve_devices
from trial_core.schedule.stop_requests import StopHandler
from trialflow.deployments.resources import GpuLimit
from trialflow.flows.lifecycle.parent_runs import stopping_with
from trialflow.flows.lifecycle.shared_gpus import GPU_LIMIT, gpu_slots
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.server.prefect_settings import environment

pytestmark = pytest.mark.server

On = Callable[[int], ExperimentConfig]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs, by a fake nvidia-smi, and a new folder of locks."""
    fake_gpus(tmp_path, monkeypatch, 4)
    monkeypatch.setattr(
        trial_core.processes.slots.device_locks, "locks_folder", lambda: tmp_path / "locks"
    )


@pytest.fixture
def on(tmp_path: Path) -> On:
    """An experiment on that many GPUs; 0: on CPU ranks."""

    def config(count: int) -> ExperimentConfig:
        variables = {} if count else {"DS_ACCELERATOR": "cpu"}
        return toy_config(
            tmp_path,
            resources={"slots_per_trial": count or 2},
            environment={"environment_variables": variables},
        )

    return config


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    with prefect_server.configured(), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def two_gpus(client: SyncPrefectClient) -> Iterator[GpuLimit]:
    limit = GpuLimit(2)
    limit.put(client)
    yield limit
    limit.remove(client)


def slots_in_use(client: SyncPrefectClient) -> int:
    return client.read_global_concurrency_limit_by_name(GPU_LIMIT).active_slots


def test_gpus_are_held_for_the_length_of_the_block(
    client: SyncPrefectClient, two_gpus: GpuLimit, on: On
) -> None:
    """No other run gets them meanwhile; after the block, or an exception, they are free."""

    def train() -> None:
        with gpu_slots(on(2)):
            assert slots_in_use(client) == 2
            with pytest.raises(TimeoutError), concurrency(GPU_LIMIT, timeout_seconds=0.5):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert slots_in_use(client) == 0


def test_cpu_ranks_do_not_wait(client: SyncPrefectClient, two_gpus: GpuLimit, on: On) -> None:
    """They do not occupy GPUs either."""
    with gpu_slots(on(2)), gpu_slots(on(0)):
        assert slots_in_use(client) == 2


def test_without_a_limit_no_run_waits(client: SyncPrefectClient, on: On) -> None:
    """A server without the limit does not count GPUs."""
    with gpu_slots(on(4)) as devices:
        assert devices == {}


def test_a_proxys_404_is_no_missing_limit(on: On, tmp_path: Path) -> None:
    """A run that took it for one would share the GPUs of another run."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as proxy,
        ExitStack() as held,
    ):
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        held.callback(thread.join)
        held.callback(proxy.shutdown)
        url = f"http://127.0.0.1:{proxy.server_port}/api"
        held.enter_context(environment({**isolated(tmp_path), "PREFECT_API_URL": url}))
        with pytest.raises(ObjectNotFound), gpu_slots(on(1)):
            pass


def test_more_gpus_than_the_limit(client: SyncPrefectClient, two_gpus: GpuLimit, on: On) -> None:
    """An error at once, instead of an endless wait."""
    with pytest.raises(LaunchError, match=r"needs 3 GPUs, and .* is 2"), gpu_slots(on(3)):
        pass


def test_a_run_does_not_wait_for_its_killed_attempt(
    client: SyncPrefectClient, two_gpus: GpuLimit, on: On
) -> None:
    """The next attempt of the same run releases what the killed attempt held."""
    killed = ExitStack()

    @flow(name="holds-gpus", retries=1)
    def train() -> int:
        if runtime.flow_run.run_count == 1:
            killed.enter_context(gpu_slots(on(2)))
            raise RuntimeError("killed, so that nothing is released")
        with gpu_slots(on(2)):
            return slots_in_use(client)

    with killed:
        assert train() == 2
    assert slots_in_use(client) == 0
    flush()


def test_more_gpus_than_the_machine_has(client: SyncPrefectClient, on: On) -> None:
    """An error before any wait, whatever the limit."""
    limit = GpuLimit(64)
    limit.put(client)
    try:
        with pytest.raises(LaunchError, match="has 4 accelerators"), gpu_slots(on(5)):
            pass
        assert slots_in_use(client) == 0
    finally:
        limit.remove(client)


def test_runs_on_one_machine_have_different_gpus(
    client: SyncPrefectClient, two_gpus: GpuLimit, on: On
) -> None:
    """Two runs never share a GPU; afterwards the GPUs are free."""
    with gpu_slots(on(1)) as first, gpu_slots(on(1)) as second:
        assert [each["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == ["0", "1"]
    with gpu_slots(on(2)) as both:
        assert both["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("taken", ["slots", "devices"])
def test_a_run_whose_caller_is_stopped_does_not_wait(
    client: SyncPrefectClient, two_gpus: GpuLimit, on: On, taken: str
) -> None:
    """As a trial of a search: it has nothing to save, and its state says why it ends."""
    runs = []

    @flow(name="waits-as-a-part")
    def train() -> None:
        runs.append(UUID(str(runtime.flow_run.id)))
        with gpu_slots(on(1)):
            raise AssertionError("no GPU was free")

    with ExitStack() as others, StopHandler(0) as stopping, stopping_with(stopping):
        if taken == "slots":
            others.enter_context(gpu_slots(on(2)))
        else:
            others.enter_context(reserve_devices(4, os.environ, lambda: None))
        stop = threading.Timer(0.2, stopping.ask, ("time budget", "5 s are over"))
        stop.start()
        with pytest.raises(Abort, match=r"time budget \(5 s are over\); it waited for GPUs"):
            train()
        stop.join()
    assert client.read_flow_run(runs[0]).state_name == "Cancelled"
    flush()


def test_a_run_that_is_stopped_while_it_waits_is_requeued(
    prefect_server: PrefectServer, client: SyncPrefectClient, two_gpus: GpuLimit, on: On,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It has nothing to save; the next worker takes it from its queue."""

    @flow(name="waits-for-gpus")
    def train() -> None:
        with gpu_slots(on(1)):
            raise AssertionError("no GPU was free")

    created = prefect_server.query("flows/", {"name": train.name})
    deployment = prefect_server.query("deployments/", {"name": "d", "flow_id": created["id"]})
    run = prefect_server.query(
        f"deployments/{deployment['id']}/create_flow_run", {"state": {"type": "PENDING"}}
    )
    flow_run = client.read_flow_run(UUID(run["id"]))

    def stop() -> None:
        until(lambda: "waiting for 1 GPUs" in caplog.text, "the run waits")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with gpu_slots(on(2)):
            stopper = threading.Thread(target=stop)
            stopper.start()
            with pytest.raises(Abort):
                run_flow(train, flow_run=flow_run)
            stopper.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert client.read_flow_run(UUID(run["id"])).state_name == "AwaitingRetry"
