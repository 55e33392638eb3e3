"""The report's text. That it reaches Prefect is tested with the flow."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tasks.report_text import ReportText, SavedCheckpoint


@pytest.fixture
def report() -> ReportText:
    return ReportText("toy", "toy-0000beef", Path("/logs"))


def told(report: ReportText, losses: list[float]) -> str:
    """The report once training has reported `losses`, one every 10 batches."""
    report.points["training"] = [(10 * i, {"loss": loss}) for i, loss in enumerate(losses, 1)]
    return report.render()


def test_metrics_are_a_table_of_the_last_values(report: ReportText) -> None:
    """The last value of each metric, with its batch."""
    assert "| training | 20 | loss | 0.25 |" in told(report, [0.5, 0.25])


def test_a_curve_needs_two_points(report: ReportText) -> None:
    """One value is no curve."""
    assert "xychart" not in told(report, [0.5])


def test_curves_are_charts_that_the_ui_draws(report: ReportText) -> None:
    """Batches along the x-axis, values as a line."""
    text = told(report, [0.5, 0.25])
    assert '  title "training: loss"\n  x-axis [10, 20]\n  line [0.5, 0.25]\n' in text


def test_values_that_cannot_be_drawn_are_left_out(report: ReportText) -> None:
    """NaN and infinity would break the chart."""
    assert "  x-axis [10, 40]\n  line [4, 1]" in told(report, [4.0, math.nan, math.inf, 1.0])


def test_a_long_curve_is_thinned_and_keeps_its_end(report: ReportText) -> None:
    """However long the run, a chart has at most some 60 points, the last one among them."""
    text = told(report, [float(i) for i in range(1000)])
    line = next(row for row in text.splitlines() if row.startswith("  line"))
    values = line.removeprefix("  line [").removesuffix("]").split(", ")
    assert 30 <= len(values) <= 61
    assert (values[0], values[-1]) == ("0", "999")


def test_restarts_and_checkpoints_are_listed(report: ReportText) -> None:
    """What was saved, how large it is, and why the run was started again."""
    report.checkpoints.append(SavedCheckpoint("0f2a", 40, 3 * 2**20))
    report.restarts.append("rank 1 was ended by SIGKILL")
    text = report.render()
    assert "| `0f2a` | 40 | 3.0 MiB |" in text
    assert "1. rank 1 was ended by SIGKILL" in text
