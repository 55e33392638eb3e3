"""A trial's report over several runs of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trialflow.tasks.report import Report
from trialflow.tasks.report.live_report import HISTORY

pytestmark = pytest.mark.usefixtures("no_artifact")


def train(report: Report, begin: int, until: int) -> None:
    """A run up to `until`, which reports every 10 batches and saves every 20."""
    report.run_started("toy-0000beef", 100, begin, 16)
    for batches in range(begin + 10, until + 1, 10):
        report.metrics_reported("training", batches, {"loss": 1000 / batches})
        if batches % 20 == 0:
            report.checkpoint_committed(f"uuid-{batches}", batches, 1024)


def curve(report: Report) -> list[int]:
    """The batches at which the report has a training loss."""
    return [point.batches for point in report._facts.history.curves["training"]]


def test_a_resumed_run_has_the_curves_of_all(new_report: Callable[[], Report]) -> None:
    """Up to the checkpoint that it goes on from; what came after that is trained again."""
    with new_report() as first:
        train(first, 0, 70)
        first.ended("stopped: preempted (SIGTERM)")
    with new_report() as second:
        train(second, 60, 80)
        assert curve(second) == [10, 20, 30, 40, 50, 60, 70, 80]
    text = second.path.read_text(encoding="utf-8")
    why = "went on from the last checkpoint; before: stopped: preempted (SIGTERM)"
    assert f"| 60 | {why} |" in text
    assert "`uuid-20`" in text
    assert "`uuid-80`" in text


def test_another_machine_finds_the_story_in_the_storage(
    new_report: Callable[..., Report], tmp_path: Path
) -> None:
    """Where the run's folder is empty, what was stored at the last run's end is read."""
    with new_report() as first:
        train(first, 0, 40)
    with new_report(tmp_path / "elsewhere") as second:
        train(second, 40, 60)
        assert curve(second) == [10, 20, 30, 40, 50, 60]
    with new_report() as third:  # the first machine again, whose own file is older
        train(third, 60, 80)
        assert curve(third) == [10, 20, 30, 40, 50, 60, 70, 80]


def test_new_ranks_within_a_run_go_back(new_report: Callable[[], Report]) -> None:
    """After a restart the curve goes on from the checkpoint, and the report says why."""
    with new_report() as report:
        train(report, 0, 70)
        report.restarting("rank 1 was ended by SIGKILL", 1, 5)
        train(report, 60, 80)
        assert curve(report) == [10, 20, 30, 40, 50, 60, 70, 80]
    text = report.path.read_text(encoding="utf-8")
    assert "| 70 | restart 1 of at most 5: rank 1 was ended by SIGKILL |" in text
    assert "| 60 | went on from the last checkpoint |" in text


def test_a_trial_that_begins_anew_has_no_past(new_report: Callable[[], Report]) -> None:
    """From batch 0 on nothing of an earlier run counts, save why it has ended."""
    with new_report() as first:
        train(first, 0, 40)
        first.ended("failed: out of memory")
    with new_report() as second:
        train(second, 0, 20)
        assert curve(second) == [10, 20]
    text = second.path.read_text(encoding="utf-8")
    assert "`uuid-40`" not in text
    assert "| 0 | began with nothing; before: failed: out of memory |" in text


def test_a_run_that_never_gets_to_train_loses_nothing(new_report: Callable[[], Report]) -> None:
    """What is remembered is not overwritten by a run that fails before it goes on."""
    with new_report() as first:
        train(first, 0, 40)
        first.ended("completed")
    second = new_report()
    second.write()
    with pytest.raises(RuntimeError), second:
        raise RuntimeError("no such module")
    with new_report() as third:
        train(third, 40, 60)
        assert curve(third) == [10, 20, 30, 40, 50, 60]
    text = third.path.read_text(encoding="utf-8")
    assert "| 40 | went on from the last checkpoint; before: failed: no such module |" in text


def test_a_damaged_story_is_left_alone(
    new_report: Callable[[], Report], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A report that cannot be read is a warning; the run goes on with what it has itself."""
    with new_report() as first:
        train(first, 0, 40)
    first.path.with_name(HISTORY).write_text("{half")
    shutil.rmtree(tmp_path / "checkpoints")
    with new_report() as second:
        train(second, 40, 60)
        assert curve(second) == [50, 60]
    assert "an earlier report cannot be read" in caplog.text


def test_a_run_that_was_killed_is_said_to_be(new_report: Callable[[], Report]) -> None:
    """Its report was never finished, so the next one says that it ended without a word."""
    killed = new_report()
    train(killed, 0, 40)
    killed.write()
    with new_report() as second:
        train(second, 40, 60)
    assert "before: it ended without a word (killed" in second.path.read_text(encoding="utf-8")
