"""GPUs that runs share: a run waits until as many are free as it trains on.

The number of GPUs is a global concurrency limit of Prefect's (`trialflow deploy --gpus 8`); where
the server has no such limit, as the one that lives for a single run, nothing is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from trial_core.config import ExperimentConfig
from trial_core.errors import LaunchError
from trial_core.slots.accelerators import count_accelerators, resolve_slot_count
from trial_core.slots.device_locks import reserve_devices
from trialflow.flows.lifecycle.leases import holding
from trialflow.flows.lifecycle.requeue import waiting_for

GPU_LIMIT = "gpu"
LEASE_LABEL = "trialflow.gpu-lease"


def gpus_of(config: ExperimentConfig) -> int:
    """How many GPUs a run of `config` takes on this machine; 0: its ranks are CPU ranks.

    Raises:
        LaunchError: more than the machine has.
    """
    environment = _environment(config)
    if count_accelerators(environment) == 0:
        return 0
    return resolve_slot_count(config.resources.slots_per_trial, environment)


@contextmanager
def gpu_slots(config: ExperimentConfig) -> Iterator[dict[str, str]]:
    """Hold the places of a run's GPUs for the length of the block, after waiting for them, and
    have so many of this machine's for it alone.

    Called in the flow's thread, before signals are taken: a run that is stopped while it waits has
    nothing to save. It goes back into its queue where it came from one.

    Returns:
        Variables for the ranks, which say which GPUs are theirs; none where nobody counts.

    Raises:
        LaunchError: there are not so many.
    """
    with ExitStack() as taken:
        with waiting_for("GPUs"):
            devices = _take(config, taken)
        yield devices


def _take(config: ExperimentConfig, taken: ExitStack) -> dict[str, str]:
    """Wait for what `config` needs, to be given back by `taken`; the variables for the ranks."""
    count = gpus_of(config)
    if count == 0 or not _are_counted(count):
        return {}
    taken.enter_context(holding(GPU_LIMIT, count, LEASE_LABEL))
    return taken.enter_context(reserve_devices(count, _environment(config), _say_they_are_taken))


def _environment(config: ExperimentConfig) -> dict[str, str]:
    return {**os.environ, **config.environment.environment_variables}


def _say_they_are_taken() -> None:
    if FlowRunContext.get() is not None:
        get_run_logger().info("waiting for GPUs of this machine: other runs have them")


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
