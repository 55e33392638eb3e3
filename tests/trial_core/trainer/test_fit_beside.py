"""Uploads, commits and TensorBoard files beside a fit's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import SCRIPT, start
from trial_core.checkpoint.store import CheckpointStore

# Quick tests of the same stages: tests/trial_core/driver.
pytestmark = [pytest.mark.slots, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ``fit_beside.py``, on two ranks under torchrun."""
    folder = tmp_path_factory.mktemp("beside")
    output = start("torchrun", folder, 2, str(SCRIPT.with_name("fit_beside.py")), str(folder))
    assert (folder / "refused-1.json").exists(), output
    return folder


def outcomes(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def test_a_checkpoint_is_committed_during_a_workload(folder: Path) -> None:
    """Rank 1 does not train batch 7 before the checkpoint of batch 5 is committed."""
    first, second = outcomes(folder, "beside")
    assert first == second
    manifests = CheckpointStore(f"file://{folder}/checkpoints").list(first["trial"])
    assert [manifest.progress.batches_trained for manifest in manifests] == [5, 10, 13]
    assert {entry.rank for entry in manifests[0].files} == {0, 1}


def test_a_rank_that_cannot_store_its_part_ends_all_ranks(folder: Path) -> None:
    """Every rank raises its error, and nothing is committed."""
    first, second = outcomes(folder, "refused")
    assert first == second
    assert first["error"].startswith("CheckpointRefused: rank 1 saved a file ")
    assert "two\\nlines" in first["error"]
    store = CheckpointStore(f"file://{folder}/checkpoints")
    assert {manifest.experiment for manifest in store.list()} == {"beside", "rest"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_trial_keeps_its_tensorboard_files_together(folder: Path, rank: int) -> None:
    """Both fits' events are in the trial's folder, on this machine and in the storage.

    The second fit's trial was constructed before its final id was known.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (first, _), (rest, _) = outcomes(folder, "beside"), outcomes(folder, "rest")
    assert rest["trial"] == first["trial"]
    for kept in (folder / "home" / first["trial"], folder / "checkpoints/runs" / first["trial"]):
        own = EventAccumulator(str(kept / f"tensorboard/rank-{rank}")).Reload().Scalars("own")
        assert [event.value for event in own] == [100 * rank + batch for batch in range(13)]
        assert len(list(kept.glob(f"tensorboard/rank-{rank}/*.pt.trace.json"))) == 2
