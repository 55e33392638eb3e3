"""What a tracker is sent, when it fails, and when points are trained again."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.support.waiting import until
from trial_core.observe.trackers import outbox as module
from trial_core.observe.trackers.journal import (
    JOURNAL,
    JournalReader,
    JournalWriter,
    State,
    read_state,
    set_damaged_aside,
)
from trial_core.observe.trackers.outbox import REOPENS_AFTER_FAILURES, Outbox
from trial_core.observe.trackers.records import AnyRecord, Began, Committed, Metrics
from trial_core.observe.trackers.tracker import RecordRefused, TrackedRun, Tracker, describe


class Noting(Tracker):
    """Keeps what it is sent; fails or refuses as a test says."""

    fails = 0
    opened = 0
    refused: Sequence[float] = ()

    def __init__(self, run: TrackedRun) -> None:
        super().__init__({}, run)
        self.got: list[AnyRecord] = []

    def open(self, known: str) -> str:
        self.opened += 1
        return known or "run-1"

    def send(self, records: Sequence[AnyRecord]) -> None:
        if self.fails:
            self.fails -= 1
            raise ConnectionError("down")
        if any(point(each)[1] in self.refused for each in records):
            raise RecordRefused("never, says http://me:hunter22@host\nfor good")
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


def sent(
    tracker: Noting, *records: AnyRecord, again: Callable[[], Tracker] | None = None
) -> tuple[list[AnyRecord], list[str]]:
    """What comes of a run with these records: what its tracker has got, and what was said.

    Args:
        again: makes the tracker, in place of giving the same one each time.
    """
    folder = tracker.run.folder
    said: list[str] = []
    with closing(JournalWriter(folder / "journal.jsonl")) as journal:
        for record in records:
            journal.append(record)
    outbox = Outbox(
        "noting", again or (lambda: tracker), folder / "journal.jsonl", folder / "noting.json",
        said.append,
    )  # fmt: skip
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
    """The first refusal is said in full, without secrets, then the number of all."""
    tracker.refused = (0.25, 0.5)
    got, said = sent(tracker, loss(4, 0.5), loss(8, 0.25), loss(12, 0.125))
    assert [point(each) for each in got] == [(12, 0.125)]
    assert said == [
        "tracker noting does not take a record, which is left out: RecordRefused: never, says "
        "http://***@host",
        "tracker noting has refused 2 records, which are left out",
    ]


def test_a_tracker_that_does_not_get_over_its_error_is_opened_again(tracker: Noting) -> None:
    """As TensorBoard's writer. It gets what is missing, once."""
    broken = Noting(tracker.run)
    sent(tracker, loss(4, 0.5))
    broken.fails = REOPENS_AFTER_FAILURES + 1
    made = [tracker, broken]
    got, _ = sent(tracker, loss(8, 0.25), loss(12, 0.125), again=made.pop)
    assert broken.got == []
    assert [point(each) for each in got] == [(4, 0.5), (8, 0.25), (12, 0.125)]


def test_a_state_that_cannot_be_written_opens_the_tracker_once(
    tracker: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    write, failures = module.write_state, [OSError(28, "No space left on device")]

    def full(path: Path, state: State) -> None:
        if failures:
            raise failures.pop()
        write(path, state)

    monkeypatch.setattr(module, "write_state", full)
    got, _ = sent(tracker, loss(4, 0.5))
    assert (got, tracker.opened) == ([loss(4, 0.5)], 1)


def test_an_end_while_the_thread_wakes_is_seen(tracker: Noting) -> None:
    folder = tracker.run.folder
    outbox = Outbox("noting", lambda: tracker, folder / JOURNAL, folder / "noting.json", print)

    class Wakes(threading.Event):
        """The end comes just before it is cleared."""

        def clear(self) -> None:
            outbox.end()
            super().clear()

    outbox._wakes = Wakes()
    outbox.thread.start()
    outbox.wake()
    outbox.thread.join(60)
    assert not outbox.thread.is_alive()


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


def test_points_between_the_last_two_checkpoints_after_a_failure(tracker: Noting) -> None:
    """A batch of records that is sent again commits its checkpoint once."""
    tracker.fails = 1
    first = [committed(4), loss(8, 0.25), committed(8)]
    sent(tracker, *first)
    again = [Began(at=0.0, batches=4, attempt=2), loss(8, 0.25, 2)]
    assert sent(tracker, *again)[0] == [*first, again[0]]


def test_an_error_is_shown_without_secrets(tracker: Noting) -> None:
    problem = ConnectionError("http://me:hunter22@host/api?token=hunter22 cannot be reached")
    assert describe(problem) == "ConnectionError: http://***@host/api?… cannot be reached"
    assert describe(OSError("http://me:hunter@22@host")) == "OSError: http://***@host"


def test_a_tracker_that_replaces_points_gets_all(
    tracker: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "replaces_points", True)
    records = [loss(4, 0.5), Began(at=0.0, batches=0, attempt=1), loss(4, 0.5)]
    assert sent(tracker, *records)[0] == records


def test_a_torn_line_of_a_killed_driver(tmp_path: Path) -> None:
    """It is not read, and the next driver's records do not run into it."""
    path = tmp_path / "journal.jsonl"
    with closing(JournalWriter(path)) as journal:
        journal.append(loss(4, 0.5))
    with path.open("ab") as file:
        file.write(b'{"type":"Metr')
    reader = JournalReader(path)
    assert reader.read(10) == [loss(4, 0.5)]
    with closing(JournalWriter(path)) as journal:
        journal.append(loss(8, 0.25))
    assert until(lambda: reader.read(10), "the next record") == [loss(8, 0.25)]


DAMAGES = (
    bytes(60) + b"\n", b'{"type":"\xff"}\n', b'{"type":"Noted","x":' + b"[" * 100_000 + b"\n",
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=["zeros", "no UTF-8", "deep"])
def test_a_damaged_journal_gives_way(tmp_path: Path, damage: bytes) -> None:
    """As after a power loss. The runs of the trackers are still known."""
    (tmp_path / JOURNAL).write_bytes(damage)
    (tmp_path / "noting.json").write_bytes(b'{"run": "run-1", "sent": 7}')
    assert "is damaged" in (set_damaged_aside(tmp_path) or "")
    assert read_state(tmp_path / "noting.json") == State(run="run-1", sent=0)
    assert not (tmp_path / JOURNAL).exists()
    assert set_damaged_aside(tmp_path) is None


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """Records that do not fit are not there in part, and later ones are read. Nor is the line of a
    driver that was killed."""
    path = tmp_path / JOURNAL
    with closing(JournalWriter(path)) as journal:
        journal.append(loss(4, 0.5))
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"type":"Metr')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(JournalWriter(path)) as journal:
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, limits[1]))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match=r"large|fit"):
                    journal.append(loss(8, 0.25))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert path.stat().st_size == whole
        journal.append(loss(12, 0.125))
    assert JournalReader(path).read(10) == [loss(4, 0.5), loss(12, 0.125)]


def test_records_before_a_damaged_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    with closing(JournalWriter(path)) as journal:
        journal.append(loss(4, 0.5))
        journal.append(loss(8, 0.25))
    with path.open("ab") as file:
        file.write(DAMAGES[1])
    reader = JournalReader(path)
    assert reader.read(10) == [loss(4, 0.5), loss(8, 0.25)]
    with pytest.raises(msgspec.MsgspecError):
        reader.read(10)
    assert reader.count == 2
