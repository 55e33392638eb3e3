"""The stored ledger of time."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import pytest

from tests.trial_core.observe.ledger.test_time_ledger import run_time
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, parse_time
from trial_core.checkpoint.retention.leftovers import find_leftovers, find_orphaned_files
from trial_core.checkpoint.storage.local import LocalStorage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.observe.ledger import stored_ledger
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.ledger.stored_ledger import KeptLedger, read_ledger
from trial_core.schedule import ending
from trial_core.schedule.ending import Ending

TRIAL = "gpt-7"


@pytest.fixture
def clock() -> RunClock:
    """A clock that stands still, after 20 s on two slots."""
    clock = RunClock(waited_seconds=20, now=lambda: 1000.0)
    clock.has_slots(2)
    return clock


def put(store: CheckpointStore, number: int, data: bytes) -> None:
    store.storage.write(layout.ledger_key(TRIAL, number), data)


def test_all_runs_of_a_trial_are_in_its_ledger(
    local_store: CheckpointStore, clock: RunClock
) -> None:
    """Of any machine, in the order of attempts, a killed one up to its last record.

    What the earlier runs have trained is redone when it is trained again.
    """
    put(local_store, 11, encode_json(run_time(11, trained_to=8)))
    put(local_store, 2, encode_json(run_time(2, trained_to=13, is_over=False)))
    with KeptLedger(local_store, TRIAL, 12, clock, Ending(), per_slot_hour=2.5) as kept:
        assert clock.trained_to == 13
        numbers = [(run.number, run.is_over) for run in kept.read().runs]
        assert numbers == [(2, False), (11, True), (12, False)]
    stored = read_ledger(local_store, TRIAL)
    ended = [(run.number, run.is_over) for run in stored.runs]
    assert ended == [(2, False), (11, True), (12, True)]
    own = stored.runs[-1]
    assert own.slot_milliseconds == {"queue": 40000}
    assert (own.slots, own.trained_to, own.per_slot_hour) == (2, 13, 2.5)
    began, until = map(parse_time, (own.began_at, own.until))
    assert began is not None
    assert until is not None
    assert until - began >= timedelta(seconds=20)
    assert read_ledger(local_store, "gpt-8").runs == ()


def test_the_record_is_renewed_while_the_run_lives(
    local_store: CheckpointStore, clock: RunClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the time of a killed run is known up to its last minute."""
    monkeypatch.setattr(stored_ledger, "WRITE_SECONDS", 0.01)
    with KeptLedger(local_store, TRIAL, 1, clock, Ending()):
        clock.batches_trained(7)
        deadline = time.monotonic() + 60
        while not any(run.trained_to == 7 for run in read_ledger(local_store, TRIAL).runs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not read_ledger(local_store, TRIAL).runs[0].is_over


@pytest.mark.parametrize("data", [b"", b"[]", b'{"number": 1}', b"\xff"])
def test_an_unreadable_record_is_left_out(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """With a warning that names it."""
    put(local_store, 1, data)
    put(local_store, 2, encode_json(run_time(2)))
    assert [run.number for run in read_ledger(local_store, TRIAL).runs] == [2]
    assert "runs/gpt-7/ledger/000001.json is not a readable record" in caplog.text


def test_a_storage_that_fails_costs_only_the_ledger(
    local_store: CheckpointStore,
    clock: RunClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It can be neither read nor written, or it hangs: warnings, and the run goes its way."""
    monkeypatch.setattr(ending, "TOTAL_SECONDS", 0.1)
    hangs = threading.Event()

    def fail(storage: LocalStorage, key: str, data: bytes = b"") -> None:
        hangs.wait(60)
        raise StorageError("HTTP 503")

    def refuse(storage: LocalStorage, folder: str) -> None:
        raise StorageError("HTTP 403")

    monkeypatch.setattr(LocalStorage, "write", fail)
    monkeypatch.setattr(LocalStorage, "sizes", refuse)
    kept = KeptLedger(local_store, TRIAL, 1, clock, Ending())
    with kept:
        assert len(kept.read().runs) == 1
    assert "lacks the trial's earlier runs, which cannot be read: HTTP 403" in caplog.text
    assert "did not take it in time" in caplog.text
    hangs.set()
    kept._thread.join(60)
    warnings = [each for each in caplog.records if "is not stored" in each.getMessage()]
    assert [each.levelno for each in warnings] == [logging.WARNING]


def test_a_ledger_is_neither_a_checkpoint_nor_garbage(
    local_store: CheckpointStore, clock: RunClock, caplog: pytest.LogCaptureFixture
) -> None:
    """No listing, sweep or search for leftovers sees it."""
    with KeptLedger(local_store, TRIAL, 1, clock, Ending()):
        pass
    assert local_store.list() == []
    assert local_store.trials() == []
    local_store.sweep(TRIAL)
    assert find_leftovers(local_store, after_days=7) == []
    assert find_orphaned_files(local_store, timedelta(0)) == []
    assert caplog.records == []
    assert len(read_ledger(local_store, TRIAL).runs) == 1
