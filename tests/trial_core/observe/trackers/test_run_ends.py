"""The end of a tracked run: what hangs, what is late, and a newer run of the trial."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.flow import one_slot
from tests.trial_core.driver.test_drive import FullMachine
from trial_core.checkpoint.retention.claims import claims
from trial_core.checkpoint.storage.local import LocalStorage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import Stopped, Superseded
from trial_core.observe.ledger.stored_ledger import read_ledger
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.trackers.journal import FOLDER, JOURNAL
from trial_core.observe.trackers.tracking import Tracking
from trial_core.schedule import ending
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler

STORED = f"runs/{TRIAL}/{FOLDER}/{JOURNAL}"
REPORT = f"runs/{TRIAL}/report.md"


def tracked(here: Path) -> ExperimentConfig:
    """An experiment with one tracker."""
    config: ExperimentConfig = one_slot(
        here, 8, trackers=[{"lines": {"file": str(here / "lines")}}]
    )
    return config


def ends_with(error: Exception) -> FullMachine:
    """A run that launches no ranks, and raises this."""
    return FullMachine(error)


def test_a_server_that_hangs_does_not_cost_what_is_stored(
    here: Path, own_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace period is over, and the report cannot be shown. The run still ends as it should."""
    monkeypatch.setattr(ending, "LEAST_SECONDS", 6.0)  # time enough for a busy machine
    publishers: list[int] = []
    answers = threading.Event()

    def publish(text: str) -> None:
        publishers.append(threading.get_ident())
        answers.wait(60)

    with StopHandler(0.0) as stopping:
        stopping.ask("cancelled", "in Prefect")
        assert stopping.wait(60)
        with pytest.raises(Stopped):
            drive(
                tracked(here), stopping=stopping, joining=ends_with(Stopped("no ranks ran")),
                publish=publish,
            )  # fmt: skip
    store = CheckpointStore(f"file://{here}/checkpoints")
    journal = store.storage.read(STORED)
    assert journal is not None
    assert b"cancelled (in Prefect); no ranks ran" in journal
    assert b"no ranks ran" in (store.storage.read(REPORT) or b"")
    assert [run.is_over for run in read_ledger(store, TRIAL).runs] == [True]
    assert claims(store) == []
    assert len(publishers) == 1
    assert threading.get_ident() not in publishers
    answers.set()


def test_a_superseded_run_leaves_the_trackers_to_the_newer_one(
    here: Path, own_package: Path
) -> None:
    """They show one run for both: it has not failed. The newer run's report stays, too."""
    store = CheckpointStore(f"file://{here}/checkpoints")
    store.storage.write(REPORT, b"newer")
    with pytest.raises(Superseded):
        drive(tracked(here), joining=ends_with(Superseded("taken over")))
    assert b"RunEnded" not in (here / "home" / TRIAL / FOLDER / JOURNAL).read_bytes()
    assert store.storage.read(REPORT) == b"newer"


def test_an_upload_of_the_last_commit_does_not_replace_the_final_journal(
    here: Path, own_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still under way when the run ends."""
    writes, continues, has_written = threading.Event(), threading.Event(), threading.Event()
    write = LocalStorage.write

    def slow(storage: LocalStorage, key: str, data: bytes) -> None:
        is_first = key == STORED and not writes.is_set()
        if is_first:
            writes.set()
            assert continues.wait(60)
        write(storage, key, data)
        if is_first:
            has_written.set()

    class LastUploadIsLate(Ending):
        """The upload of the commit ends after the end has begun its own."""

        def join(self, thread: threading.Thread) -> bool:
            thread.join(0.2)
            continues.set()
            return super().join(thread)

    monkeypatch.setattr(LocalStorage, "write", slow)
    store = CheckpointStore(f"file://{here}/checkpoints")
    folder = here / "home" / TRIAL
    (folder / FOLDER).mkdir(parents=True)
    arguments: Any = (tracked(here), TRIAL, folder, store, 1, lambda: TimeLedger(TRIAL, ()))
    with Tracking(*arguments, LastUploadIsLate(), logging.getLogger()) as tracking:
        tracking.run_started(TRIAL, 8, 0, 2)
        tracking.checkpoint_committed("4f0c21aa", 4, 1024)
        assert writes.wait(60)
        tracking.run_ended("completed")
    assert has_written.wait(60)
    stored = store.storage.read(STORED)
    assert stored == (folder / FOLDER / JOURNAL).read_bytes()
    assert b"RunEnded" in stored
