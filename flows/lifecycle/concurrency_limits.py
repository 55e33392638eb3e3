"""Slots of Prefect's global concurrency limits, held by a flow run across its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency

# How long a killed run's slots stay occupied for other runs; Prefect's minimum.
LEASE_SECONDS = 60.0


@contextmanager
def concurrency_slots(limit: str, slots: int, label: str) -> Iterator[None]:
    """Wait for slots of a concurrency limit, and hold them for the block.

    A lease that cannot be renewed is only a warning: it is no reason to lose training.

    Args:
        label: the flow run's label that stores the lease. The next attempt releases a killed
            attempt's lease by it, instead of waiting for its own slots.
    """
    _release_previous_lease(label)
    with (
        ConcurrencyContext() as held,
        concurrency(
            limit,
            occupy=slots,
            lease_duration=LEASE_SECONDS,
            raise_on_lease_renewal_failure=False,
        ),
    ):
        _store_lease(held, label)
        yield


def _release_previous_lease(label: str) -> None:
    """Release what an attempt of this run held when it was killed."""
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        lease = client.read_flow_run(UUID(str(runtime.flow_run.id))).labels.get(label)
        if lease is not None:
            client.release_concurrency_slots_with_lease(UUID(str(lease)))


def _store_lease(held: ConcurrencyContext, label: str) -> None:
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        for lease in held.cleanup_lease_ids:
            client.update_flow_run_labels(UUID(str(runtime.flow_run.id)), {label: str(lease)})
