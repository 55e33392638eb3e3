"""What a run notes for its trackers."""

from __future__ import annotations

import logging
from pathlib import Path

from tests.support.driving import TRIAL
from tests.trial_core.observe.trackers.test_run_ends import tracked
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.events.observers import WorkloadTimes
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, JournalReader
from trial_core.observe.trackers.records import Metrics
from trial_core.observe.trackers.tracking import Tracking
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler


def test_samples_are_counted_by_the_size_that_each_batch_had(here: Path, own_package: Path) -> None:
    """12 batches of 4 samples, then one of 8 and a shorter one."""
    folder = here / "home" / TRIAL
    (folder / FOLDER).mkdir(parents=True)
    store, ending = CheckpointStore(f"file://{here}/checkpoints"), Ending(StopHandler(60.0))
    with Tracking(
        tracked(here), TRIAL, folder, store, 1, lambda: TimeLedger(TRIAL, ()), ending,
        logging.getLogger(),
    ) as tracking:  # fmt: skip
        tracking.samples_trained(12 * 4)
        tracking.run_started(TRIAL, 20, 12, 8)
        tracking.training_timed(WorkloadTimes(14, 2.0, [], samples=8 + 5))
        tracking.metrics_reported("training", 14, {"loss": 0.5})
        tracking.run_ended("completed")
    records = JournalReader(folder / FOLDER / JOURNAL).read(100)
    noted = [each for each in records if isinstance(each, Metrics)]
    counted = [
        each.values["progress/samples"] for each in noted if "progress/samples" in each.values
    ]
    assert counted == [61]
    assert {each.samples for each in noted if each.batches == 14} == {61}
