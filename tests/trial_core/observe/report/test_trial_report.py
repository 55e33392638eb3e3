"""The text of a report."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.trial_core.observe.ledger.test_time_ledger import run_time
from trial_core.observe.events.run_status import RunStatus
from trial_core.observe.events.throughput import Throughput
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.report.history import MAX_CHECKPOINTS, Event, Point, SavedCheckpoint
from trial_core.observe.report.trial_report import TrialFacts


@pytest.fixture
def facts() -> TrialFacts:
    """The facts of a run before its first stage."""
    return TrialFacts("toy", "toy-0000beef", "loss", True, "s3://b/checkpoints")


def report(facts: TrialFacts, losses: list[float], every: int = 10) -> str:
    """The report after training has reported `losses`, one per `every` batches."""
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


def test_progress(facts: TrialFacts) -> None:
    """The report shows a bar, batches, speed and time left; the stage, and the upload beside it."""
    seconds = 1000.0
    status = facts.run_status = RunStatus(lambda: seconds)
    status.run_started("toy-0000beef", 400, 0, 16)
    status.stage_started("checkpoint-upload", "@50")
    status.stage_started("train-workload", "[0→100]")
    seconds += 10
    status.batches_trained(100)
    text = facts.render()
    bar = "█" * 8 + "░" * 22
    assert "**running** · batch 100 of 400 · trial `toy-0000beef`" in text
    assert f"`{bar}` **25%** · 160 samples/s · 30 s left" in text
    assert "now: train-workload [0→100], beside it checkpoint-upload @50" in text


def test_throughput(facts: TrialFacts) -> None:
    """The average of the run and the last workload; each rank's memory, of 64 ranks at most."""
    assert "## Throughput" not in facts.render()
    peaks = (3 * 2**30, 5 * 2**30)
    now, run = Throughput(2, 50, 800, 0.25), Throughput(2, 40, 640, 0.2, peaks)
    facts.run_status.throughput_measured(10, now, run)
    assert (
        "## Throughput\n\n- this run: 40.0 samples/s · 640 tokens/s · 20 % MFU\n"
        "- last train-workload: 50.0 samples/s · 800 tokens/s · 25 % MFU\n"
        "- peak memory: 5.0 GiB on rank 1; by rank: 3.0 GiB, 5.0 GiB\n"
    ) in facts.render()
    run = replace(run, peak_memory_bytes=tuple(range(100)))
    facts.run_status.throughput_measured(10, now, run)
    assert "99 B on rank 99; by rank: 0 B, 1 B" in facts.render()
    assert "62 B, 63 B, … 36 more\n" in facts.render()


def test_last_metrics_and_curves(facts: TrialFacts) -> None:
    """The table has the last values. A chart needs two points."""
    assert "xychart" not in report(facts, [0.5])
    text = report(facts, [0.5, 0.25, 2.5e-07])
    assert "| training | 30 | loss | 2.5e-07 |" in text
    assert '  title "loss: training (blue) 2.5e-07"\n  x-axis "batch" [10, 20, 30]\n' in text


def test_nan_and_infinity_are_not_drawn(facts: TrialFacts) -> None:
    """They would break the chart: its line connects the finite neighbours."""
    text = report(facts, [4.0, math.nan, math.inf, 1.0], every=20)
    assert '  x-axis "batch" [20, 80]\n  line [4, 1]\n' in text


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends(facts: TrialFacts) -> None:
    """Of 10,000 points 400 are kept, from the whole run."""
    report(facts, [float(i) for i in range(10_000)], every=1)
    points = [point.batches for point in facts.history.curves["training"]]
    assert (len(points), points[0], points[-1]) == (400, 1, 10_000)
    assert max(b - a for a, b in pairwise(points)) <= 60


def test_best_and_latest(facts: TrialFacts) -> None:
    """The best is by the searcher metric; a checkpoint without validation cannot be the best."""
    for each in (saved(10, 0.5), saved(20, 0.25), saved(30)):
        facts.history.add_checkpoint(each, smaller_is_better=True)
    text = facts.render()
    assert "- best: loss 0.25 at batch 20, checkpoint `uuid-20`" in text
    assert "- latest: batch 30, checkpoint `uuid-30`" in text
    assert "| 20 | `uuid-20` | 3.0 MiB | 0.1 s | 12 s | **0.25** (best) |" in text


def test_deleted_checkpoints_are_counted_and_not_listed(facts: TrialFacts) -> None:
    """The table has existing checkpoints only."""
    facts.history.add_checkpoint(saved(10), smaller_is_better=True)
    facts.history.add_checkpoint(saved(20), smaller_is_better=True)
    facts.history.drop_checkpoint("uuid-10")
    text = facts.render()
    assert "uuid-10" not in text
    assert "1 more deleted by the experiment's retention policy" in text


def test_what_checkpoints_have_cost(facts: TrialFacts) -> None:
    """How many there were, those that are deleted too; how long one, and all, kept training."""
    spent = {"launch": 9000, "train": 170, "validate": 20, "checkpoint_stall": 10}
    facts.ledger = lambda: TimeLedger("toy-0000beef", (run_time(1, slot_milliseconds=spent),))
    for batches in (10, 20, 30):
        facts.history.add_checkpoint(saved(batches), smaller_is_better=True)
    facts.history.drop_checkpoint("uuid-10")
    expected = "3 stored; training waited 0.1 s for one (median), for all 5.0 % of the loop's time"
    assert expected in facts.render()


def test_no_best_without_a_metric_that_the_user_has_named(facts: TrialFacts) -> None:
    """A script need not name one."""
    facts.history.add_checkpoint(saved(20, 0.25), smaller_is_better=True)
    facts.has_metric = False
    text = facts.render()
    assert "best" not in text
    assert "| 20 | `uuid-20` | 3.0 MiB | 0.1 s | 12 s | 0.25 |" in text


def test_the_best_of_many_checkpoints_is_listed(facts: TrialFacts) -> None:
    """The list is bounded, and always contains the best."""
    for i in range(1, 1001):
        facts.history.add_checkpoint(saved(i, abs(i - 7)), smaller_is_better=True)
    assert len(facts.history.checkpoints) == MAX_CHECKPOINTS
    text = facts.render()
    assert "| **0** (best) |" in text
    assert f"{1000 - 16} more not listed here" in text


def test_the_rank_that_computes_slowest(facts: TrialFacts) -> None:
    """Named if its forward pass takes at least 1.2 times as long as the others'."""
    facts.forward_seconds = (0.1, 0.1, 0.25, 0.1)
    assert (
        "slowest computing: rank 2, whose forward pass takes 250 ms, that of the others 100 ms "
        "(median)"
    ) in facts.render()
    facts.forward_seconds = (0.1, 0.11)
    assert "slowest computing" not in facts.render()
    facts.forward_seconds = (0.0, 0.1)  # unknown
    assert "slowest computing" not in facts.render()


def test_the_slowest_rank(facts: TrialFacts) -> None:
    """The rank that waits longest for its data is named, if it waits 2 % of the time."""
    facts.waits.append((10.0, [0.1, 4.0, 0.3]))
    assert "slowest rank: 1, which waits for its data 40% of the time, the others 2% (median)" in (
        facts.render()
    )
    facts.waits.extend([(1000.0, [0.1, 0.1, 0.1])] * 2)
    assert "slowest rank" not in facts.render()
    facts.waits.append((10.0, [4.0, 0.3]))  # other ranks, after a restart
    assert "slowest rank: 0, which waits for its data 40% of the time" in facts.render()


def test_restarts_are_listed(facts: TrialFacts) -> None:
    """Each with its batch and its cause; of many, the last."""
    for i in range(100):
        facts.history.add_event(i, f"rank 1 was ended by SIGKILL, time {i}\nmore")
    text = facts.render()
    assert "| 99 | rank 1 was ended by SIGKILL, time 99 |" in text
    assert "… 70 earlier" in text


def test_the_ledger_of_time(facts: TrialFacts) -> None:
    """Its buckets, and which earlier run counts only until some time; no section without one."""
    assert "## Time" not in facts.render()
    killed, live = run_time(1, is_over=False), run_time(2, is_over=False, per_slot_hour=4.0)
    facts.ledger = lambda: TimeLedger("toy-0000beef", (killed, live))
    text = facts.render()
    assert "\n## Time\n\ngoodput 87.5 % of 4 h 00 min slot time in 2 runs, cost 7.00\n" in text
    assert "\n| slots | time | share |\n|---|---:|---:|\n| queue | 30 min 00 s | 12.5 % |\n" in text
    assert "\n| train | 3 h 30 min | 87.5 % |\n\nrun 1 has no recorded end" in text
    assert "run 2 has no" not in text


def test_text_from_outside_is_escaped(facts: TrialFacts) -> None:
    """Neither a metric's name nor an error message breaks the table or becomes markup."""
    facts.last["training"] = (10, {"a|b<c>": "*x*\nsecond"})
    facts.status = "failed: <lambda> took\ttoo\x1b[31m long"
    strange = run_time(slot_milliseconds={"a|b<c>": 1000})
    facts.ledger = lambda: TimeLedger("toy-0000beef", (strange,))
    text = facts.render()
    assert r"| a\|b&lt;c> | 1.0 s | 100.0 % |" in text
    assert r"| training | 10 | a\|b&lt;c> | \*x\* |" in text
    assert "**failed: &lt;lambda> took\ttoo long**" in text


def test_a_stored_history_is_text_from_outside(facts: TrialFacts) -> None:
    """Whoever may write to the storage writes no markup into the report of a resumed run."""
    evil = "a` | 1 |\n\n<script>alert(1)</script> ![pixel](http://host/p.png)"
    facts.history.checkpoints = [SavedCheckpoint(uuid=evil, batches=1, total_bytes=1, metric=0.5)]
    facts.history.events = [Event(at="<img src=//e.x/p>", batches=1, what="resumed")]
    points = [Point(batches, {"x\n```\n<b>": 1.0}) for batches in (1, 2)]
    facts.history.curves = {"speed": points}
    text = facts.render()
    assert "| `a' ¦ 1 ¦` |" in text
    assert "| &lt;img src=//e.x/p> |" in text
    assert not {"<script>", "<img", "<b>"} & {*re.findall("<[a-z]+>?", text)}
