"""What the driver asks of ranks that upload."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.messages import Persisted
from trial_core.run.observer import Observer
from trial_core.run.sequencer import Progress
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trialflow.tasks.checkpoint import _upload
from trialflow.tasks.run import TrialRun


class OneRank:
    """In place of ranks: has stored whatever it is asked to."""

    def request(self, *request: object, **limits: float | None) -> list[Persisted]:
        self.limits = limits
        return [Persisted(files=[], seconds=0.0)]


@pytest.mark.parametrize(
    ("stopping", "checkpointing", "limit"),
    [
        ({"stall_timeout_seconds": 2000}, {"stall_timeout_seconds": 70}, 2070),
        ({"stall_timeout_seconds": None}, {}, None),
        ({}, {"stall_timeout_seconds": None}, None),
    ],
)
def test_ranks_that_upload_are_waited_for_longer_than_each_waits(
    tmp_path: Path, stopping: dict[str, Any], checkpointing: dict[str, Any], limit: float | None
) -> None:
    """So that a rank whose storage hangs says so itself; and one that is stopped is ended."""
    config = toy_config(tmp_path, stopping=stopping, checkpointing=checkpointing)
    store = CheckpointStore(str(tmp_path))
    run = TrialRun(config, "toy-0000beef", tmp_path, store, Observer())
    run.slots = ranks = OneRank()  # type: ignore[assignment]
    _upload(run, StagedCheckpoint.now(str(uuid.uuid4()), Progress(4), {}, ("a",)))
    assert ranks.limits == {"stall_seconds": limit}
