"""A presumed-dead run whose trial another run has taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import one_slot, ranks, train
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import Superseded

pytestmark = [pytest.mark.slots, pytest.mark.server]


@pytest.mark.usefixtures("prefect_server")
def test_a_superseded_run_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its earlier checkpoint is kept; its next commit is refused, which ends it and its ranks.

    A later run resumes from the kept checkpoint, and may save.
    """
    commit = CheckpointStore.commit

    def commit_and_be_superseded(
        store: CheckpointStore, manifest: Manifest, fence: Fence | None = None
    ) -> None:
        commit(store, manifest, fence)
        store.take_over(manifest.trial, "another")

    before = ranks()
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "commit", commit_and_be_superseded)
        with pytest.raises(Superseded, match="attempt another, by"):
            train(one_slot(here, 12, max_restarts=3))
    assert ranks() == before
    store = CheckpointStore(f"file://{here}/checkpoints")
    (kept,) = store.list()
    assert kept.progress.batches_trained == 4
    assert train(one_slot(here, 8), kept.trial).batches_trained == 8
    assert [each.progress.batches_trained for each in store.list()] == [4, 8]
