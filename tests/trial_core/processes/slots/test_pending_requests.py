"""Requests that not every rank has answered yet."""

from __future__ import annotations

import pytest

from trial_core.messages import AnyRequest, PersistCheckpoint, RunScript, TrainBatches
from trial_core.processes.slots.pending_requests import PendingRequests


@pytest.mark.parametrize(
    ("request_", "is_waiting"),
    [(RunScript(checkpoint=None, batches_trained=0), True), (TrainBatches(until=5), False)],
)
def test_only_a_script_waits_for_the_upload_beside_it(
    request_: AnyRequest, is_waiting: bool
) -> None:
    """Its silence is then no hang: the upload has a timeout. Batches are due in any case."""
    pending = PendingRequests(world_size=1)
    first = pending.add(request_)
    assert not pending.is_waiting_for_another(first)
    pending.add(PersistCheckpoint(uuid="u"))
    assert pending.is_waiting_for_another(first) is is_waiting
