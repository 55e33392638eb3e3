"""How far a Core API script is, from what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from trial_core.driver.stages.script import ScriptReports
from trial_core.messages import MetricsKind, MetricsReported
from trial_core.schedule.sequencer import Progress


@pytest.fixture
def script() -> ScriptReports:
    return ScriptReports("loss", smaller_is_better=True)


def report(
    kind: MetricsKind, steps: int, metrics: dict[str, Any], rank: int = 0, group: str = ""
) -> MetricsReported:
    return MetricsReported(
        kind=kind, steps_completed=steps, metrics=metrics, rank=rank, group=group
    )


def test_a_validation_decides_which_checkpoint_is_best(script: ScriptReports) -> None:
    """A checkpoint of its step contains it."""
    assert script.reported(report("training", 3, {"loss": 2.0})) == []
    assert script.reported(report("validation", 4, {"loss": 0.5})) == []
    assert script.stored(4) == Progress(
        batches_trained=4, validated_at=4, checkpointed_at=4, best_metric=0.5, improved=True
    )
    script.reported(report("validation", 6, {"loss": 0.75}))
    assert not script.stored(6).improved
    assert script.metrics == {"training": {"loss": 2.0}, "validation": {"loss": 0.75}}


def test_a_validation_without_the_searcher_metric_is_no_best_one(script: ScriptReports) -> None:
    """The script continues; the caller warns."""
    (warning,) = script.reported(report("validation", 4, {"accuracy": 0.5}))
    assert 'searcher.metric "loss" is not among the validation metrics' in warning
    assert (script.progress.validated_at, script.progress.best_metric) == (4, None)


def test_without_a_searcher_metric_nothing_is_compared() -> None:
    """A script without an experiment file need not name one."""
    script = ScriptReports(None, smaller_is_better=True)
    assert script.reported(report("validation", 4, {"accuracy": 0.5})) == []
    assert script.progress.validated_at == 4


def test_a_late_report_of_another_rank_counts_for_its_own_step(script: ScriptReports) -> None:
    """Rank 0 may be ahead: the trial does not go back, as it does if rank 0 says so."""
    script.reported(report("training", 9, {"loss": 3.0}))
    script.reported(report("validation", 8, {"loss": 0.5}, rank=1))
    script.reported(report("training", 8, {"loss": 4.0}, rank=1))
    assert script.progress == Progress(
        batches_trained=9, validated_at=8, best_metric=0.5, improved=True
    )
    assert script.metrics == {"training": {"loss": 3.0}, "validation": {"loss": 0.5}}
    script.reported(report("training", 2, {"loss": 5.0}))
    assert (script.progress.batches_trained, script.metrics["training"]) == (2, {"loss": 5.0})


def test_groups_of_one_step_are_kept_side_by_side(script: ScriptReports) -> None:
    """In any order, from any rank; those of earlier steps are replaced."""
    script.reported(report("training", 3, {"loss": 2.0}))
    script.reported(report("training", 4, {"gan/loss": 3.0}, rank=1, group="gan"))
    script.reported(report("training", 4, {"loss": 1.0}))
    assert script.metrics["training"] == {"gan/loss": 3.0, "loss": 1.0}


def test_a_validation_that_its_checkpoint_lacks_is_said_once(script: ScriptReports) -> None:
    """Ranks that do not wait for each other: the checkpoint may be stored first."""
    script.stored(4)
    (warning,) = script.reported(report("validation", 4, {"loss": 0.5}, rank=1))
    assert warning.startswith("the checkpoint at 4 does not have the validation metrics at 4, ")
    assert script.reported(report("validation", 4, {"loss": 0.25}, rank=1)) == []
