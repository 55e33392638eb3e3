"""GPUs that runs share: a run waits until it has as many as it trains on.

Prefect's global concurrency limit `gpu` counts them (`trialflow deploy --gpus 8`). Without that
limit, as on the embedded server, no run waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from trial_core.config import ExperimentConfig
from trial_core.driver.placement import choose_provider
from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import count_accelerators, resolve_slot_count
from trial_core.processes.slots.device_locks import reserve_devices
from trialflow.flows.lifecycle.flow_run_state import is_healthy, requeue_if_stopped, set_state
from trialflow.flows.lifecycle.parent_runs import stop_handler_of_caller

GPU_LIMIT = "gpu"
LEASE_LABEL = "trialflow.gpu-lease"
"""The flow run's label that stores the lease."""
# How long a killed run's slots stay occupied for other runs; Prefect's minimum.
LEASE_SECONDS = 60.0


@contextmanager
def gpu_slots(config: ExperimentConfig) -> Iterator[dict[str, str]]:
    """Wait for the run's GPUs, and hold them for the block: slots of the limit, and devices.

    Call it in the flow's thread, before the stop monitor takes over signals. A run that is stopped
    while it waits has nothing to save, and goes back into its queue if it came from one; one whose
    caller is stopped is Cancelled.

    Returns:
        Variables that show the ranks these devices only; empty without the limit.

    Raises:
        Abort: the run, or its caller, is stopped, and its state is set.
        LaunchError: the limit or the machine has fewer GPUs than the run needs.
        ObjectNotFound: a proxy answered 404 in the server's place.
    """
    if choose_provider(config) is not None:
        yield {}  # the devices of this machine are not for this run
        return
    with ExitStack() as held:
        with requeue_if_stopped("GPUs"):
            variables = _acquire(config, held)
        yield variables


def _acquire(config: ExperimentConfig, held: ExitStack) -> dict[str, str]:
    variables = {**os.environ, **config.rank_variables}
    if count_accelerators(variables) == 0:
        return {}
    resources = config.resources
    count = resolve_slot_count(resources.min_slots, variables, resources.max_slots)
    if not has_gpu_limit(count):
        return {}
    held.enter_context(_counted_slots(count))
    return held.enter_context(reserve_devices(count, variables, _log_waiting, _end_with_caller))


def _end_with_caller() -> None:
    """Raise Abort if the run that called this one is asked to stop."""
    caller = stop_handler_of_caller()
    if caller is not None and caller.request is not None:
        reason = f"Stopped: {caller.request}; it waited for GPUs, so there is nothing to save"
        set_state(Cancelled(message=reason))
        raise Abort(reason)


def _log_waiting() -> None:
    if FlowRunContext.get() is not None:
        get_run_logger().info("waiting for GPUs of this machine: other runs use them")


def has_gpu_limit(count: int) -> bool:
    """Return whether the server counts GPUs. Prefect would log a warning for a missing limit."""
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        except ObjectNotFound:
            if not is_healthy(client):  # a proxy's answer: the server may count GPUs
                raise
            return False
    if count > limit.limit:
        raise LaunchError(
            f"the run needs {count} GPUs, and Prefect's concurrency limit {GPU_LIMIT!r} is "
            f"{limit.limit}: reduce resources.slots_per_trial, or raise the limit (`trialflow "
            "deploy --gpus N`)"
        )
    if FlowRunContext.get() is not None and limit.active_slots + count > limit.limit:
        get_run_logger().info(
            "waiting for %d GPUs: %d of %d are in use", count, limit.active_slots, limit.limit
        )
    return True


@contextmanager
def _counted_slots(slots: int) -> Iterator[None]:
    """Wait for slots of the limit, and hold them for the block.

    A lease that cannot be renewed is only a warning, because training must not be lost. The next
    attempt releases a killed attempt's lease, instead of waiting for its own slots.
    """
    run_id = None if runtime.flow_run.id is None else UUID(str(runtime.flow_run.id))
    if run_id is not None:
        with get_client(sync_client=True) as client:
            lease = client.read_flow_run(run_id).labels.get(LEASE_LABEL)
            if lease is not None:
                client.release_concurrency_slots_with_lease(UUID(str(lease)))
    with ConcurrencyContext() as held, ExitStack() as acquired:
        while not _acquire_slots(slots, acquired):
            _end_with_caller()
        if run_id is not None:
            with get_client(sync_client=True) as client:
                for each in held.cleanup_lease_ids:
                    client.update_flow_run_labels(run_id, {LEASE_LABEL: str(each)})
        yield


def _acquire_slots(slots: int, acquired: ExitStack) -> bool:
    """Acquire slots of the limit. False if they are not free, or the caller is stopped meanwhile; a
    run without a caller waits for them."""
    caller = stop_handler_of_caller()
    try:
        acquired.enter_context(
            concurrency(
                GPU_LIMIT,
                occupy=slots,
                max_retries=None if caller is None else 0,
                lease_duration=LEASE_SECONDS,
                raise_on_lease_renewal_failure=False,
            )
        )
    except ConcurrencySlotAcquisitionError as error:
        answer = getattr(error.__cause__, "response", None)
        if caller is None or answer is None or answer.status_code != HTTPStatus.LOCKED:
            raise
        caller.wait(float(answer.headers["Retry-After"]))
        return False
    return True
