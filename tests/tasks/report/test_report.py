"""What the report says. That it reaches Prefect is tested with the flow."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from trialflow.tasks.report.history import MAX_CHECKPOINTS, SavedCheckpoint
from trialflow.tasks.report.trial_report import TrialFacts


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def facts() -> TrialFacts:
    """What a report knows of a run before its first stage."""
    return TrialFacts("toy", "toy-0000beef", "loss", True, "s3://b/checkpoints")


def told(facts: TrialFacts, losses: list[float], every: int = 10) -> str:
    """The report once training has reported `losses`, one every so many batches."""
    for i, loss in enumerate(losses, 1):
        facts.history.add_point("training", every * i, {"loss": loss})
        facts.last["training"] = (every * i, {"loss": loss})
    return facts.render()


def saved(batches: int, metric: float | None = None) -> SavedCheckpoint:
    """A checkpoint of 3 MiB."""
    return SavedCheckpoint(
        uuid=f"uuid-{batches}", batches=batches, total_bytes=3 * 2**20, metric=metric,
        blocked_seconds=0.07, upload_seconds=12.0,
    )  # fmt: skip


def test_how_far_it_has_come(facts: TrialFacts) -> None:
    """A bar, batches, speed and the time left; the stage, and the upload beside it."""
    clock = Clock()
    progress = facts.progress = type(facts.progress)(clock)
    progress.run_started("toy-0000beef", 400, 0, 16)
    progress.stage_started("checkpoint-upload", "@50")
    progress.stage_started("train-workload", "[0→100]")
    clock.now += 10
    progress.batches_trained(100)
    text = facts.render()
    bar = "█" * 8 + "░" * 22
    assert "**running** · batch 100 of 400 · trial `toy-0000beef`" in text
    assert f"`{bar}` **25%** · 160 samples/s · 30 s left" in text
    assert "now: train-workload [0→100], beside it checkpoint-upload @50" in text


def test_metrics_are_a_table_of_the_last_values(facts: TrialFacts) -> None:
    """The last value of each metric, with its batch."""
    assert "| training | 20 | loss | 0.25 |" in told(facts, [0.5, 0.25])


def test_a_curve_needs_two_points(facts: TrialFacts) -> None:
    """One value is no curve."""
    assert "xychart" not in told(facts, [0.5])


def test_curves_are_charts_that_the_ui_draws(facts: TrialFacts) -> None:
    """Batches along the x-axis, values as a line; no exponents, which Mermaid does not know."""
    text = told(facts, [0.5, 0.25, 2.5e-07])
    assert '  title "training: loss"\n  x-axis "batch" 10 --> 30\n' in text
    assert "\n  line [0.5, 0.25, 0.00000025]\n" in text


def test_values_that_cannot_be_drawn_are_left_out(facts: TrialFacts) -> None:
    """NaN and infinity would break the chart: the line goes straight over them."""
    text = told(facts, [4.0, math.nan, math.inf, 1.0], every=20)
    assert '  x-axis "batch" 20 --> 80\n  line [4, 1]\n' in text
    assert "| training | 80 | loss | 1 |" in text


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends(facts: TrialFacts) -> None:
    """Of 10 000 points a few hundred are remembered, from all over the run, and some 60 drawn."""
    text = told(facts, [float(i) for i in range(10_000)], every=1)
    points = [point.batches for point in facts.history.curves["training"]]
    assert (len(points), points[0], points[-1]) == (400, 1, 10_000)
    assert max(b - a for a, b in pairwise(points)) <= 60
    line = next(row for row in text.splitlines() if row.startswith("  line"))
    values = line.removeprefix("  line [").removesuffix("]").split(", ")
    assert (len(values), values[0], values[-1]) == (61, "0", "9999")
    assert float(values[30]) == pytest.approx(5000, abs=1)


def test_best_and_latest(facts: TrialFacts) -> None:
    """By the searcher's metric; what was not validated cannot be the best."""
    for each in (saved(10, 0.5), saved(20, 0.25), saved(30)):
        facts.history.add_checkpoint(each, smaller_is_better=True)
    text = facts.render()
    assert "- best: loss 0.25 at batch 20, checkpoint `uuid-20`" in text
    assert "- latest: batch 30, checkpoint `uuid-30`" in text
    assert "| 20 | `uuid-20` | 3.0 MiB | 0.1 s | 12 s | **0.25** (best) |" in text


def test_what_was_deleted_is_counted_not_listed(facts: TrialFacts) -> None:
    """A checkpoint that the rules did not keep is gone from the list."""
    facts.history.add_checkpoint(saved(10), smaller_is_better=True)
    facts.history.add_checkpoint(saved(20), smaller_is_better=True)
    facts.history.drop_checkpoint("uuid-10")
    text = facts.render()
    assert "uuid-10" not in text
    assert "1 more deleted, since the experiment's rules did not keep them" in text


def test_the_best_of_very_many_checkpoints_is_listed(facts: TrialFacts) -> None:
    """The list is bounded, and never loses the best."""
    for i in range(1, 1001):
        facts.history.add_checkpoint(saved(i, abs(i - 7)), smaller_is_better=True)
    assert len(facts.history.checkpoints) == MAX_CHECKPOINTS
    text = facts.render()
    assert "| **0** (best) |" in text
    assert f"{1000 - 16} more not listed here" in text


def test_the_rank_that_the_others_wait_for(facts: TrialFacts) -> None:
    """The one that waits longest for its data, when that is worth a word."""
    facts.waits.append((10.0, [0.1, 4.0, 0.3]))
    assert "slowest rank: 1, which waits for its data 40% of the time, the others 2% (median)" in (
        facts.render()
    )
    facts.waits.extend([(1000.0, [0.1, 0.1, 0.1])] * 2)
    assert "slowest rank" not in facts.render()


def test_restarts_are_listed(facts: TrialFacts) -> None:
    """Why the run was started again, and after how many batches; the last ones of many."""
    for i in range(100):
        facts.history.add_event(i, f"rank 1 was ended by SIGKILL, time {i}\nmore")
    text = facts.render()
    assert "| 99 | rank 1 was ended by SIGKILL, time 99 |" in text
    assert "… 70 before" in text


def test_other_peoples_words_are_shown_as_they_are(facts: TrialFacts) -> None:
    """Neither a metric's name nor an error breaks the table or becomes markup."""
    facts.last["training"] = (10, {"a|b<c>": "*x*\nsecond"})
    facts.status = "failed: <lambda> took\ttoo\x1b[31m long"
    text = facts.render()
    assert r"| training | 10 | a\|b&lt;c> | \*x\* |" in text
    assert "**failed: &lt;lambda> took\ttoo long**" in text
