"""The stage checkpoint-upload."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.checkpoint import _upload, checkpoint_upload
from trial_core.errors import RankFailed
from trial_core.messages import Persisted, ReleaseStaging
from trial_core.schedule.sequencer import Progress


class OneRank:
    """A slot group of one rank that has stored everything."""

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
def test_an_upload_has_a_longer_stall_timeout_than_its_ranks(
    tmp_path: Path, stopping: dict[str, Any], checkpointing: dict[str, Any], limit: float | None
) -> None:
    """So a rank reports a hung storage itself, and the driver ends a rank that is stopped."""
    config = toy_config(tmp_path, stopping=stopping, checkpointing=checkpointing)
    store = CheckpointStore(str(tmp_path))
    launch = Launch(Run(config, "toy-0000beef", tmp_path, store))
    launch.slots = ranks = OneRank()  # type: ignore[assignment]
    _upload(launch, StagedCheckpoint.now(str(uuid.uuid4()), Progress(4), {}, ("a",)), [])
    assert ranks.limits == {"stall_seconds": limit}


def test_a_committed_checkpoint_counts_as_stored(tmp_path: Path) -> None:
    """Also if its ranks fail then. The restart that follows needs no pause."""

    class Dying(OneRank):
        def request(self, *request: object, **limits: float | None) -> list[Persisted]:
            if isinstance(request[0], ReleaseStaging):
                raise RankFailed(rank=0, host="here", during="checkpoint-upload")
            return super().request(*request, **limits)

    run = Run(toy_config(tmp_path), "toy-0000beef", tmp_path, CheckpointStore(str(tmp_path)))
    launch = Launch(run)
    launch.slots = Dying()  # type: ignore[assignment]
    launch.answers.topology = Topology(world_size=1, data_parallel_size=1)
    staged = StagedCheckpoint.now(str(uuid.uuid4()), Progress(4), {}, ("a",))
    with pytest.raises(RankFailed):
        checkpoint_upload(launch, staged).result()
    assert run.stored_checkpoints == 1
