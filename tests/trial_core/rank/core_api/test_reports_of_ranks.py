"""Reports of a script's other ranks than 0. Real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.slots import lines, toy_config
from tests.support.trackers import in_tensorboard
from trial_core.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slots


def script_config(here: Path, steps: int, **hparams: Any) -> Any:
    """Of a script whose rank 1 reports, over a slow connection; each rank stores its part."""
    given = {
        "record": str(here), "once": str(here / "once"), "store_every": 2, "shard": True,
        "reporter": 1, "slow_seconds": 0.3, **hparams,
    }  # fmt: skip
    return toy_config(
        here, entrypoint=f"python3 core_script.py {steps}", searcher={"metric": "loss"},
        hyperparameters=given, resources={"slots_per_trial": 2}, max_restarts=1,
        trackers=["tensorboard"],
    )  # fmt: skip


@pytest.mark.long
def test_a_checkpoint_holds_what_any_rank_reported_before_it(here: Path) -> None:
    """Rank 1 dies, and another run continues: no report is lost, and none counts twice."""
    drive(script_config(here, 6, do="kill", at_step=3))
    result = drive(script_config(here, 8))

    steps = [line["step"] for line in lines(here, "script", 1) if "step" in line]
    assert steps == [1, 2, 3, *range(3, 7), 7, 8]
    totals = {step: 3.0 * sum(range(1, step + 1)) for step in range(1, 9)}
    stored = CheckpointStore(str(here / "checkpoints")).list(TRIAL)
    assert [
        (each.progress.batches_trained, each.progress.validated_at, each.progress.best_metric)
        for each in stored
    ] == [(step, step, 1 / step) for step in (2, 4, 6, 8)]
    assert [each.metrics for each in stored] == [
        {"training": {"total": totals[step]}, "validation": {"loss": 1 / step}}
        for step in (2, 4, 6, 8)
    ]
    assert (result.training_metrics, result.validation_metrics, result.validated_at) == (
        {"total": totals[8]}, {"loss": 1 / 8}, 8
    )  # fmt: skip
    shown = here / "checkpoints" / "runs" / TRIAL / "tensorboard" / "driver"
    assert in_tensorboard(shown, "training/total") == list(totals.items())
    assert in_tensorboard(shown, "validation/loss") == [
        (step, pytest.approx(1 / step)) for step in (2, 4, 6, 8)
    ]
