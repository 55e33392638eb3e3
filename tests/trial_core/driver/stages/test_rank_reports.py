"""Reports of several ranks for one step."""

from __future__ import annotations

from typing import Any

import pytest

from trial_core.driver.stages import script
from trial_core.driver.stages.script import ScriptReports
from trial_core.errors import TrialError
from trial_core.messages import MetricsReported

METRICS = {"loss": 0.25, "rates": [float("nan"), 1]}


def report(steps: int, rank: int, group: str = "", **metrics: Any) -> MetricsReported:
    return MetricsReported(
        kind="training", steps_completed=steps, metrics=metrics or METRICS, rank=rank, group=group
    )


def test_equal_reports_count_once() -> None:
    """For each step and group, whichever rank comes first; NaN is equal to NaN."""
    ranks = ScriptReports(None, smaller_is_better=True)
    given = [(1, 0), (1, 1), (2, 1), (2, 0), (2, 3), (3, 2)]
    counts = [ranks.counts(report(*each)) for each in given]
    assert counts == [True, False, True, False, False, True]
    assert ranks.counts(report(3, 1, "inference"))


def test_different_reports_are_refused() -> None:
    """Which of them counts would be chance. The error names a metric and the ranks."""
    ranks = ScriptReports(None, smaller_is_better=True)
    ranks.counts(report(10, 0))
    with pytest.raises(TrialError) as refused:
        ranks.counts(report(10, 2, **METRICS | {"loss": 0.5}))
    assert str(refused.value) == (
        "rank 0 and rank 2 have both reported training metrics at 10, and not the same: "
        '"loss" is 0.5 on rank 2; reduce the metrics over the ranks, and report them on one rank '
        "(if context.distributed.rank == 0)"
    )
    with pytest.raises(TrialError, match='"rates" is missing on rank 1'):
        ranks.counts(report(10, 1, loss=0.25))


def test_a_rank_may_report_a_step_again() -> None:
    """Its later metrics are those that another rank's are compared with."""
    ranks = ScriptReports(None, smaller_is_better=True)
    assert ranks.counts(report(1, 0))
    assert ranks.counts(report(1, 0, loss=0.5))
    assert not ranks.counts(report(1, 1, loss=0.5))


def test_old_reports_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a million steps needs no more memory than a short one."""
    monkeypatch.setattr(script, "REMEMBERED", 2)
    ranks = ScriptReports(None, smaller_is_better=True)
    assert all(ranks.counts(report(step, 0)) for step in range(5))
    assert [ranks.counts(report(step, 1)) for step in (3, 4, 2)] == [False, False, True]
