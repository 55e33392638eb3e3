"""How far a Core API script is, from what it reports."""

from __future__ import annotations

import pytest

from trial_core.driver.stages.script import ScriptReports
from trial_core.schedule.sequencer import Progress


@pytest.fixture
def script() -> ScriptReports:
    return ScriptReports("loss", smaller_is_better=True)


def test_a_validation_decides_which_checkpoint_is_best(script: ScriptReports) -> None:
    """A checkpoint of its step contains it."""
    assert script.reported("training", 3, {"loss": 2.0}) is None
    assert script.reported("validation", 4, {"loss": 0.5}) is None
    assert script.stored(4) == Progress(
        batches_trained=4, validated_at=4, checkpointed_at=4, best_metric=0.5, improved=True
    )
    script.reported("validation", 6, {"loss": 0.75})
    assert not script.stored(6).improved
    assert script.metrics == {"training": {"loss": 2.0}, "validation": {"loss": 0.75}}


def test_a_validation_without_the_searcher_metric_is_no_best_one(script: ScriptReports) -> None:
    """The script continues; the caller warns."""
    mistake = script.reported("validation", 4, {"accuracy": 0.5})
    assert 'searcher.metric "loss" is not among the validation metrics' in str(mistake)
    assert (script.progress.validated_at, script.progress.best_metric) == (4, None)


def test_without_a_searcher_metric_nothing_is_compared() -> None:
    """A script without an experiment file need not name one."""
    script = ScriptReports(None, smaller_is_better=True)
    assert script.reported("validation", 4, {"accuracy": 0.5}) is None
    assert script.progress.validated_at == 4
