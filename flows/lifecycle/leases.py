"""Places of Prefect's global concurrency limits, held by a flow run over all its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency

# How long the places of a run that was killed stay taken, for others; Prefect's shortest.
LEASE_SECONDS = 60.0


@contextmanager
def concurrency_slots(
    limit: str, places: int, label: str, max_retries: int | None = None, is_strict: bool = False
) -> Iterator[None]:
    """Hold so many places of a limit for the length of the block, after waiting for them.

    A lease that cannot be renewed is a warning: training is not worth losing for it.

    Args:
        label: of the flow run: which lease it holds, for the attempt after this one, which would
            else wait for its own places.
        max_retries: how often to ask again; None: until they are free.
        is_strict: whether a limit that does not exist has no places, rather than all.

    Raises:
        ConcurrencySlotAcquisitionError: they are not free; or there is no such limit.
    """
    _free_what_a_dead_attempt_holds(label)
    with (
        ConcurrencyContext() as held,
        concurrency(
            limit,
            occupy=places,
            max_retries=max_retries,
            lease_duration=LEASE_SECONDS,
            strict=is_strict,
            raise_on_lease_renewal_failure=False,
        ),
    ):
        _write_down(held, label)
        yield


def _free_what_a_dead_attempt_holds(label: str) -> None:
    """An attempt that was killed has given nothing back."""
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        lease = client.read_flow_run(UUID(str(runtime.flow_run.id))).labels.get(label)
        if lease is not None:
            client.release_concurrency_slots_with_lease(UUID(str(lease)))


def _write_down(held: ConcurrencyContext, label: str) -> None:
    """Which lease this attempt holds, on the flow run."""
    if runtime.flow_run.id is None:
        return
    with get_client(sync_client=True) as client:
        for lease in held.cleanup_lease_ids:
            client.update_flow_run_labels(UUID(str(runtime.flow_run.id)), {label: str(lease)})
