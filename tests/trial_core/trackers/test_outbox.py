"""What a tracker is sent, when it fails, and when points are trained again."""

from __future__ import annotations

import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import until
from trial_core.trackers import outbox as module
from trial_core.trackers.journal import (
    JOURNAL,
    JournalReader,
    JournalWriter,
    State,
    read_state,
    set_damaged_aside,
)
from trial_core.trackers.outbox import Outbox, describe
from trial_core.trackers.records import AnyRecord, Began, Committed, Metrics
from trial_core.trackers.tracker import RecordRefused, TrackedRun, Tracker


class Noting(Tracker):
    """Keeps what it is sent; fails or refuses as a test says."""

    fails = 0
    refused: float | None = None

    def __init__(self, run: TrackedRun) -> None:
        super().__init__({}, run)
        self.got: list[AnyRecord] = []

    def open(self, known: str) -> str:
        return known or "run-1"

    def send(self, records: Sequence[AnyRecord]) -> None:
        if self.fails:
            self.fails -= 1
            raise ConnectionError("down")
        if any(point(each)[1] == self.refused for each in records):
            raise RecordRefused("never")
        self.got += records


def loss(batches: int, value: float, attempt: int = 1) -> Metrics:
    return Metrics(
        at=0.0, batches=batches, samples=0, attempt=attempt, values={"training/loss": value}
    )


def point(record: AnyRecord) -> tuple[int, float | None]:
    return (
        (record.batches, record.values.get("training/loss"))
        if isinstance(record, Metrics)
        else (-1, -1.0)
    )


def committed(batches: int) -> Committed:
    return Committed(at=0.0, batches=batches, uuid="u", url="file:///u", size_bytes=1, digest="d")


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noting:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAST_PAUSE_SECONDS", 0.01)
    return Noting(TrackedRun("toy-1", "toy", tmp_path, tmp_path))


def sent(tracker: Noting, *records: AnyRecord) -> tuple[list[AnyRecord], list[str]]:
    """What comes of a run with these records: what its tracker has got, and what was said."""
    folder = tracker.run.folder
    said: list[str] = []
    with JournalWriter(folder / "journal.jsonl") as journal:
        for record in records:
            journal.append(record)
    outbox = Outbox(
        "noting", lambda: tracker, folder / "journal.jsonl", folder / "noting.json", said.append
    )
    outbox.thread.start()
    outbox.end()
    outbox.thread.join(60)
    assert not outbox.thread.is_alive()
    return tracker.got, said


def test_a_failure_is_said_once_and_nothing_is_lost(tracker: Noting) -> None:
    tracker.fails = 3
    records = [loss(4, 0.5), loss(8, 0.25)]
    got, said = sent(tracker, *records)
    assert got == records
    assert [line.partition(";")[0] for line in said] == [
        "tracker noting: ConnectionError: down", "tracker noting: it is reached again",
    ]  # fmt: skip
    assert read_state(tracker.run.folder / "noting.json") == State(run="run-1", sent=2)


def test_a_refused_record_is_left_out_and_the_others_are_sent(tracker: Noting) -> None:
    tracker.refused = 0.25
    got, said = sent(tracker, loss(4, 0.5), loss(8, 0.25), loss(12, 0.125))
    assert [point(each) for each in got] == [(4, 0.5), (12, 0.125)]
    assert said == ["tracker noting does not take a record, which is left out: never"]


def test_points_that_are_trained_again(tracker: Noting) -> None:
    """The same values are not sent again, in the same run or in a later one; others are."""
    first = [loss(4, 0.5), committed(4), loss(8, 0.25), loss(12, 0.125)]
    sent(tracker, *first)
    again = [Began(at=0.0, batches=4, attempt=2), loss(8, 0.25, 2), loss(12, 0.1, 2)]
    got, _ = sent(tracker, *again, loss(12, 0.1, 2))
    assert got == [*first, again[0], again[2]]


def test_points_between_the_last_two_checkpoints(tracker: Noting) -> None:
    """The newest checkpoint may be damaged: a resume from the one before repeats its points."""
    first = [committed(4), loss(8, 0.25), committed(8)]
    sent(tracker, *first)
    again = [Began(at=0.0, batches=4, attempt=2), loss(8, 0.25, 2)]
    assert sent(tracker, *again)[0] == [*first, again[0]]


def test_an_error_is_shown_without_secrets(tracker: Noting) -> None:
    problem = ConnectionError("http://me:hunter22@host/api?token=hunter22 cannot be reached")
    assert describe(problem) == "ConnectionError: http://***@host/api?… cannot be reached"


def test_a_tracker_that_replaces_points_gets_all(
    tracker: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "replaces_points", True)
    records = [loss(4, 0.5), Began(at=0.0, batches=0, attempt=1), loss(4, 0.5)]
    assert sent(tracker, *records)[0] == records


def test_a_torn_line_of_a_killed_driver(tmp_path: Path) -> None:
    """It is not read, and the next driver's records do not run into it."""
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.append(loss(4, 0.5))
    with path.open("ab") as file:
        file.write(b'{"type":"Metr')
    reader = JournalReader(path)
    assert reader.read(10) == [loss(4, 0.5)]
    with JournalWriter(path) as journal:
        journal.append(loss(8, 0.25))
    assert until(lambda: reader.read(10), "the next record") == [loss(8, 0.25)]


def test_a_damaged_journal_gives_way(tmp_path: Path) -> None:
    """As after a power loss. The runs of the trackers are still known."""
    (tmp_path / JOURNAL).write_bytes(bytes(60) + b"\n")
    (tmp_path / "noting.json").write_bytes(b'{"run": "run-1", "sent": 7}')
    assert "is damaged" in (set_damaged_aside(tmp_path) or "")
    assert read_state(tmp_path / "noting.json") == State(run="run-1", sent=0)
    assert not (tmp_path / JOURNAL).exists()
    assert set_damaged_aside(tmp_path) is None


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A record that does not fit is not there in part, and later ones are read."""
    path = tmp_path / JOURNAL
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JournalWriter(path) as journal:
        journal.append(loss(4, 0.5))
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(OSError, match=r"large|fit"):
                journal.append(loss(8, 0.25))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        journal.append(loss(12, 0.125))
    assert JournalReader(path).read(10) == [loss(4, 0.5), loss(12, 0.125)]
