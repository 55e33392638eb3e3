"""A run deletes old checkpoints while it trains: the flow on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import one_slot, stages, train
from tests.support.prefect import PrefectServer
from trial_core.checkpoint.retention.claims import claims
from trial_core.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slots, pytest.mark.server]


def test_a_run_keeps_the_checkpoints_of_its_rules(
    prefect_server: PrefectServer, here: Path
) -> None:
    """It prunes after its commits, and its claim ends with it."""
    rules = {"save_trial_best": 0, "save_trial_latest": 1, "keep_every": {"batches": 8}}
    url = f"file://{here}/checkpoints"
    result = train(one_slot(here, 12, checkpoint_storage={"url": url, **rules}))  # saves every 4
    store = CheckpointStore(url)
    manifests = store.list()
    assert [manifest.progress.batches_trained for manifest in manifests] == [8, 12]
    assert result.checkpoint_uuid == manifests[-1].uuid
    assert claims(store) == []
    names = [s.name for s in stages(prefect_server, result.flow_run_id, "checkpoint-prune @12")]
    assert names[-1] == "checkpoint-prune @12"
