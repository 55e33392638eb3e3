"""Pruning while a script trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fitting import fit_toys
from trial_core.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slots


def test_a_fit_prunes_by_its_retention_policy(tmp_path: Path) -> None:
    """Saved every 4 batches; kept are the last one, and one for every 8 batches."""
    rules = {"save_trial_latest": 1, "keep_every": {"batches": 8}}
    url = f"file://{tmp_path}/checkpoints"
    every, end = {"batches": 4}, {"batches": 20}
    run = {
        "init": {"exp_conf": {"name": "toy", "checkpoint_storage": {"url": url, **rules}}},
        "fit": {"max_length": end, "reporting_period": every, "checkpoint_period": every},
    }
    ((result,),) = fit_toys("python", tmp_path / "launch", run, ranks=1)
    manifests = CheckpointStore(url).list()
    assert [manifest.progress.batches_trained for manifest in manifests] == [8, 16, 20]
    assert result["checkpoint_uuid"] == manifests[-1].uuid
