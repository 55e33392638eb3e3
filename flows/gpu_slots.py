"""GPUs that runs share: a run waits until as many are free as it trains on.

The number of GPUs is a global concurrency limit of Prefect's (`trialflow deploy --gpus 8`); where
the server has no such limit, as the one that lives for a single run, nothing is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from trial_core.config import ExperimentConfig
from trial_core.errors import LaunchError
from trial_core.slots.accelerators import count_accelerators

GPU_LIMIT = "gpu"
# How long the places of a run that was killed stay taken, for others; Prefect's shortest.
LEASE_SECONDS = 60.0
LEASE_LABEL = "trialflow.gpu-lease"


def gpus_of(config: ExperimentConfig) -> int:
    """How many GPUs a run of `config` takes on this machine; 0: its ranks are CPU ranks."""
    there = count_accelerators({**os.environ, **config.environment.environment_variables})
    asked = config.resources.slots_per_trial
    return asked if there and isinstance(asked, int) else there


@contextmanager
def gpu_slots(count: int) -> Iterator[None]:
    """Hold the places of `count` GPUs for the length of the block, after waiting for them.

    Called in the flow's thread, before signals are taken: a run that is cancelled while it waits
    has nothing to save, and ends as Prefect ends it. A lease that cannot be renewed is a warning:
    training is not worth losing for it.

    Args:
        count: 0 waits for nothing: CPU ranks.

    Raises:
        LaunchError: there are not so many.
    """
    if count == 0 or not _are_counted(count):
        yield
        return
    _free_what_a_dead_attempt_holds()
    with (
        ConcurrencyContext() as held,
        concurrency(
            GPU_LIMIT,
            occupy=count,
            lease_duration=LEASE_SECONDS,
            raise_on_lease_renewal_failure=False,
        ),
    ):
        _write_down(held)
        yield


def _are_counted(count: int) -> bool:
    """Whether there is a limit. Prefect would warn of a missing one."""
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        except ObjectNotFound:
            return False
    if count > limit.limit:
        raise LaunchError(
            f"the run needs {count} GPUs, and Prefect's concurrency limit {GPU_LIMIT!r} is "
            f"{limit.limit}: ask for fewer slots, or raise it (`trialflow deploy --gpus …`)"
        )
    if FlowRunContext.get() is not None and limit.active_slots + count > limit.limit:
        get_run_logger().info(
            "waiting for %d GPUs: %d of %d are taken", count, limit.active_slots, limit.limit
        )
    return True


def _free_what_a_dead_attempt_holds() -> None:
    """An attempt that was killed has given nothing back: this one would wait for its own GPUs."""
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        lease = client.read_flow_run(UUID(str(runtime.flow_run.id))).labels.get(LEASE_LABEL)
        if lease is not None:
            client.release_concurrency_slots_with_lease(UUID(str(lease)))


def _write_down(held: ConcurrencyContext) -> None:
    """Which lease this attempt holds, on the flow run, for the attempt after it."""
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        for lease in held.cleanup_lease_ids:
            client.update_flow_run_labels(UUID(str(runtime.flow_run.id)), {LEASE_LABEL: str(lease)})
