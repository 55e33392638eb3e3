"""Runs wait for GPUs; where nobody counts them, they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency.sync import concurrency

from deployments.on_server import GpuLimit
from flows.embedded import flush
from flows.gpu_slots import GPU_LIMIT, gpu_slots
from tests.support.prefect import PrefectServer
from trial_core.errors import LaunchError

pytestmark = pytest.mark.server


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


def taken(client: SyncPrefectClient) -> int:
    return client.read_global_concurrency_limit_by_name(GPU_LIMIT).active_slots


def test_gpus_are_held_for_the_length_of_the_block(
    client: SyncPrefectClient, two_gpus: GpuLimit
) -> None:
    """Nobody else gets them meanwhile; at its end, however it ends, they are free."""

    def train() -> None:
        with gpu_slots(2):
            assert taken(client) == 2
            with pytest.raises(TimeoutError), concurrency(GPU_LIMIT, timeout_seconds=0.5):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert taken(client) == 0


def test_cpu_ranks_wait_for_nothing(client: SyncPrefectClient, two_gpus: GpuLimit) -> None:
    """Nor do they keep others waiting."""
    with gpu_slots(2), gpu_slots(0):
        assert taken(client) == 2


def test_without_a_limit_nothing_is_waited_for(client: SyncPrefectClient) -> None:
    """On a server that was told of no GPUs a run begins at once."""
    with gpu_slots(64):
        pass


def test_more_gpus_than_there_are(client: SyncPrefectClient, two_gpus: GpuLimit) -> None:
    """Refused at once, instead of waiting for ever."""
    with pytest.raises(LaunchError, match=r"needs 3 GPUs, and .* is 2"), gpu_slots(3):
        pass


def test_a_run_does_not_wait_for_itself(client: SyncPrefectClient, two_gpus: GpuLimit) -> None:
    """What an attempt that was killed still holds is free for the next one of the same run."""
    killed = ExitStack()

    @flow(name="holds-gpus", retries=1)
    def train() -> int:
        if runtime.flow_run.run_count == 1:
            killed.enter_context(gpu_slots(2))
            raise RuntimeError("killed, so that nothing is given back")
        with gpu_slots(2):
            return taken(client)

    with killed:
        assert train() == 2
    assert taken(client) == 0
    flush()
