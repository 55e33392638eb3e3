"""Journals of long runs: in segments. What a report costs does not depend on how many were before.

Judged by counts of bytes and records, at 1,000 and at 100,000 reports.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.support.driving import TRIAL
from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.base import MAX_OBJECT_BYTES
from trial_core.checkpoint.storage.local import LocalStorage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.trackers import journal as module, outbox as outbox_module
from trial_core.observe.trackers.journal import (
    FOLDER,
    JOURNAL,
    SEGMENT_BYTES,
    JournalReader,
    JournalWriter,
    State,
    read_state,
    set_damaged_aside,
    write_state,
)
from trial_core.observe.trackers.outbox import AT_ONCE, Outbox
from trial_core.observe.trackers.records import AnyRecord, Began, Committed, Deleted, Metrics
from trial_core.observe.trackers.sender import END, SenderOrder, unsent
from trial_core.observe.trackers.stored_journal import adopt_stored, keep
from trial_core.observe.trackers.tracker import Tracker

FEW, MANY = 1_000, 100_000
LOGGER = logging.getLogger("tests.trackers")
STORED = layout.run_file_key(TRIAL, FOLDER)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 700)


def report(batches: int, attempt: int = 1, metrics: int = 5) -> Metrics:
    values: dict[str, float | None] = {f"training/{i}": 0.5 + batches + i for i in range(metrics)}
    return Metrics(at=1.0, batches=batches, samples=0, attempt=attempt, values=values)


def committed(uuid: str) -> Committed:
    return Committed(at=1.0, batches=0, uuid=uuid, url="file:///u", size_bytes=1, digest="d")


def write(run_dir: Path, batches: Sequence[int], attempt: int = 1) -> None:
    """Append a beginning and reports to the journal of a run's folder."""
    with closing(JournalWriter(run_dir / FOLDER / JOURNAL)) as journal:
        journal.append(Began(at=1.0, batches=batches[0], attempt=attempt))
        for each in batches:
            journal.append(report(each, attempt))


def read(run_dir: Path, most: int = AT_ONCE) -> list[AnyRecord]:
    """All records of the journal in a run's folder."""
    reader, found = JournalReader(run_dir / FOLDER / JOURNAL), []
    while records := reader.read(most):
        found += records
    assert reader.count == len(found)
    return found


def reports(run_dir: Path) -> list[tuple[int, int]]:
    """Attempt and batches of the reports in a run's folder."""
    return [(each.attempt, each.batches) for each in read(run_dir) if isinstance(each, Metrics)]


class Machines:
    """A storage, and the folders of a trial on two machines."""

    def __init__(self, folder: Path) -> None:
        self.store = CheckpointStore(f"file://{folder}/store")
        self.first, self.second = folder / "machine-1", folder / "machine-2"

    def keep(self, run_dir: Path, is_end: bool = True) -> None:
        keep(self.store, TRIAL, run_dir, LOGGER, is_end)

    def adopt(self, run_dir: Path) -> None:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        adopt_stored(self.store, TRIAL, run_dir, LOGGER)

    @property
    def stored(self) -> dict[str, int]:
        return self.store.storage.sizes(STORED)


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that are written to the storage, by their keys."""
    seen: dict[str, int] = {}
    write = LocalStorage.write

    def counting(storage: LocalStorage, key: str, data: bytes) -> None:
        seen[key] = seen.get(key, 0) + len(data)
        write(storage, key, data)

    monkeypatch.setattr(LocalStorage, "write", counting)
    return seen


def test_a_journal_larger_than_the_limit_of_objects_is_read_back(machines: Machines) -> None:
    """On another machine, with the states: the run continues there, and nothing is sent twice."""
    line = len(msgspec.json.encode(report(1, metrics=600))) + 1
    count = MAX_OBJECT_BYTES // line + 200
    with closing(JournalWriter(machines.first / FOLDER / JOURNAL)) as journal:
        for batches in range(count):
            journal.append(report(batches, metrics=600))
    state = State(run="there", sent=count - 100)
    write_state(machines.first / FOLDER / "noting.json", state)
    machines.keep(machines.first, is_end=False)
    machines.keep(machines.first)
    assert sum(machines.stored.values()) > MAX_OBJECT_BYTES > 16 * max(machines.stored.values())
    machines.adopt(machines.second)
    assert [each.batches for each in read(machines.second)] == [*range(count)]  # type: ignore[union-attr]
    assert read_state(machines.second / FOLDER / "noting.json") == state
    assert unsent(machines.second, ["noting"]) == {"noting": 100}


def test_a_store_writes_what_is_new(machines: Machines, written: dict[str, int]) -> None:
    """After a report and after 100,000, at most a segment: what is stored is not stored again."""
    cost = []
    for begin, end in ((0, FEW), (FEW, MANY)):
        write(machines.first, range(begin, end))
        machines.keep(machines.first, is_end=False)
        written.clear()
        write(machines.first, [end])
        machines.keep(machines.first, is_end=False)
        cost.append(sum(written.values()))
    print(f"bytes written by one store after {FEW:,} and {MANY:,} reports: {cost}")
    assert max(cost) < SEGMENT_BYTES + 16 * 1024
    assert sum(machines.stored.values()) > 16 * SEGMENT_BYTES


def test_a_line_of_a_report_is_written_once_or_twice(tmp_path: Path) -> None:
    """Once into the journal, and once more when its segment is complete."""
    write(tmp_path, range(FEW * 10))
    used = sum(each.stat().st_size for each in (tmp_path / FOLDER).iterdir())
    lines = sum(len(msgspec.json.encode(each)) + 1 for each in read(tmp_path))
    assert lines <= used < lines + 4096
    assert (tmp_path / FOLDER / JOURNAL).stat().st_size <= SEGMENT_BYTES + 4096


class Nothing(Tracker):
    """Takes everything."""

    def __init__(self) -> None:
        self.count = 0

    def open(self, known: str) -> str:
        return known or "run"

    def send(self, records: Sequence[AnyRecord]) -> None:
        self.count += len(records)


def test_a_report_needs_as_much_memory_as_the_first(tmp_path: Path) -> None:
    """Of a run without checkpoints, all of whose points may come again."""
    tracker = Nothing()
    outbox = Outbox("nothing", lambda: tracker, tmp_path / JOURNAL, tmp_path / "a.json", print)
    needed, batches = [], 0
    for target in (FEW, MANY):
        while batches < target:
            batches += 1
            outbox._note(report(batches, metrics=1), tracker)
        tracemalloc.start()
        for _ in range(20):
            batches += 1
            outbox._pending = [report(batches, metrics=1)]
            outbox._send(tracker, outbox._pending)
        needed.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(f"peak of bytes for 20 reports after {FEW:,} and {MANY:,}: {needed}")
    outbox._points.close()
    assert needed[1] < 2 * needed[0]


MEASURED = """import sys; from pathlib import Path; from trial_core.observe.trackers import sender
sender.main(); Path(sys.argv[1]).write_text(Path("/proc/self/status").read_text())"""


def sender_bytes(folder: Path, count: int) -> int:
    """The peak memory of a sender's process that sends this many reports."""
    write(folder, range(count))
    order = SenderOrder(
        trial=TRIAL, experiment="toy", run_dir=str(folder), patience_seconds=300.0, measures=False,
        trackers={"lines": {"file": str(folder / "lines")}},
    )  # fmt: skip
    given = msgspec.json.encode(order) + b"\n" + END
    subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder / "status")], input=given, check=True
    )
    assert read_state(folder / FOLDER / "lines.json").sent == count + 1
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


@pytest.mark.long
@pytest.mark.usefixtures("own_package")
def test_a_sender_of_many_reports_is_as_large_as_one_of_few(tmp_path: Path) -> None:
    """Without a checkpoint, which lets points be forgotten. 500,000 points took 92 MB."""
    few, many = (sender_bytes(tmp_path / str(count), count) for count in (FEW, MANY))
    print(f"bytes of a sender of {FEW:,} and of {MANY:,} reports: {few:,} and {many:,}")
    assert many - few < 16 * 2**20


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("most", [1, 3, AT_ONCE])
def test_a_reader_follows_a_writer_over_segments(tmp_path: Path, most: int) -> None:
    """Each record once and in order, wherever the reader is when a segment is completed."""
    path = tmp_path / FOLDER / JOURNAL
    reader, seen = JournalReader(path), []
    with closing(JournalWriter(path)) as journal:
        for batches in range(60):
            journal.append(report(batches))
            if batches % 7 == 0:
                seen += reader.read(most)
    while more := reader.read(most):
        seen += more
    assert seen == [report(batches) for batches in range(60)] == read(tmp_path)
    assert len([*path.parent.iterdir()]) > 10


def old_form(path: Path, count: int) -> bytes:
    """A journal of one file with all records, as it was before segments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(msgspec.json.encode(report(each)) + b"\n" for each in range(count))
    path.write_bytes(data)
    return data


@pytest.mark.usefixtures("small_segments")
def test_a_journal_without_segments_is_continued(machines: Machines) -> None:
    """One that is stored, and is larger than a segment: it is divided by the next record."""
    data = old_form(machines.first / "old", 20)
    machines.store.storage.write(f"{STORED}/{JOURNAL}", data)
    machines.adopt(machines.first)
    reader = JournalReader(machines.first / FOLDER / JOURNAL)
    seen = reader.read(13)
    write(machines.first, [20], attempt=2)
    seen += reader.read(AT_ONCE)
    begin = Began(at=1.0, batches=20, attempt=2)
    assert seen == [*map(report, range(20)), begin, report(20, 2)] == read(machines.first)
    machines.keep(machines.first)
    assert max(machines.stored.values()) < 2 * 700
    machines.adopt(machines.second)
    assert read(machines.second) == seen


def digests(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("journal-*"), key=os.path.getmtime)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b":1,", b":7,")),
    "shorter": lambda path: path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n"),
    "long": lambda path: os.truncate(path, 2**40),
}


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_in_the_storage_sets_the_journal_aside(
    machines: Machines, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The trackers' runs are continued, and it is said."""
    write(machines.first, range(30))
    write_state(machines.first / FOLDER / "noting.json", State(run="there", sent=9))
    machines.keep(machines.first)
    folder = Path(machines.store.url.removeprefix("file://")) / STORED
    (damaged,) = [each for each in folder.glob("journal-*") if b'"batches":1,' in each.read_bytes()]
    DAMAGES[damage](damaged)
    machines.adopt(machines.second)
    assert [line for line in caplog.messages if "is damaged and was renamed" in line]
    assert read(machines.second) == []
    assert read_state(machines.second / FOLDER / "noting.json") == State(run="there", sent=0)


@pytest.mark.usefixtures("small_segments")
def test_a_damaged_segment_here_gives_way_to_the_stored_one(machines: Machines) -> None:
    """As a damaged journal does."""
    write(machines.first, range(30))
    machines.keep(machines.first)
    before = read(machines.first)
    digests(machines.first)[2].write_text("x\n")
    machines.adopt(machines.first)
    assert read(machines.first) == before


@pytest.mark.usefixtures("small_segments")
def test_a_storage_that_fails_sets_nothing_aside(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment that cannot be read now may be read later: the journal here stays as it was."""
    write(machines.second, [4])
    shutil.copytree(machines.second, machines.first)
    write(machines.first, range(30), attempt=2)
    machines.keep(machines.first)
    before = read(machines.second)
    reads = LocalStorage.read

    def failing(storage: LocalStorage, key: str) -> bytes | None:
        if "journal-" in key:
            raise ConnectionError("down")
        return reads(storage, key)

    monkeypatch.setattr(LocalStorage, "read", failing)
    machines.adopt(machines.second)
    assert [line for line in caplog.messages if "may get it twice" in line]
    assert read(machines.second) == before
    monkeypatch.undo()
    machines.adopt(machines.second)
    assert read(machines.second) == read(machines.first)


@pytest.mark.usefixtures("small_segments")
def test_two_runs_that_store_at_once_do_not_mix_their_segments(machines: Machines) -> None:
    """A run that is superseded still stores: there is its journal, or the newer one's, whole."""
    write(machines.first, range(20))
    machines.keep(machines.first)
    machines.adopt(machines.second)
    write(machines.second, range(10, 40), attempt=2)
    machines.keep(machines.second, is_end=False)
    write(machines.first, range(20, 60))
    machines.keep(machines.first, is_end=False)
    third = machines.first.with_name("machine-3")
    machines.adopt(third)
    assert reports(third) == reports(machines.first)
    machines.keep(machines.second)
    machines.adopt(third)
    assert reports(third) == reports(machines.second)


@pytest.mark.usefixtures("small_segments")
def test_a_superseded_journal_does_not_count(machines: Machines) -> None:
    """At the end of a superseded run the newer one's journal stays, though it is shorter; nor is an
    older journal taken in place of a newer one. No record of either is read for that."""
    write(machines.first, range(20))
    write_state(machines.first / FOLDER / "noting.json", State(run="there", sent=3))
    machines.keep(machines.first)
    machines.adopt(machines.second)
    write(machines.second, [20, 24], attempt=2)
    write_state(machines.second / FOLDER / "noting.json", State(run="there", sent=23))
    machines.keep(machines.second)
    write(machines.first, range(20, 60))
    for each in digests(machines.first):
        each.unlink()
    machines.keep(machines.first)
    third = machines.first.with_name("machine-3")
    machines.adopt(third)
    assert reports(third) == reports(machines.second) != []
    assert read_state(third / FOLDER / "noting.json").sent == 23

    write(third, [28], attempt=3)
    before = reports(third)
    machines.adopt(third)
    assert reports(third) == before


@pytest.mark.usefixtures("small_segments")
def test_a_state_ahead_of_its_journal_loses_no_record(machines: Machines) -> None:
    """As one whose store was cut off after the states: what comes next is not counted as sent."""
    write(machines.first, range(20))
    write_state(machines.first / FOLDER / "noting.json", State(run="there", sent=30))
    machines.keep(machines.first)
    machines.adopt(machines.second)
    write(machines.second, range(20, 30), attempt=2)
    assert unsent(machines.second, ["noting"]) == {"noting": 11}


@pytest.mark.usefixtures("small_segments")
def test_a_disk_that_is_full_when_a_segment_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is lost or there twice; the segment is completed later."""
    replace = module.replace_file
    calls: list[Path] = []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) in (1, 3, 7):  # some are segments, one is the new list of them
            raise OSError(28, "No space left on device")
        replace(path, data)

    monkeypatch.setattr(module, "replace_file", full)
    write(tmp_path, range(60))
    assert [each.batches for each in read(tmp_path)] == [0, *range(60)]  # type: ignore[union-attr]
    assert JOURNAL in {calls[index - 1].name for index in (1, 3, 7)}
    lines = (tmp_path / FOLDER / JOURNAL).read_bytes().split(b"\n", 1)[1]
    assert len(lines) < 2 * 700
    assert set_damaged_aside(tmp_path / FOLDER) is None


class Recalling(Nothing):
    """Fails for some time, and remembers what it was told when it was opened."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.recalled: list[list[Committed | Deleted]] = []

    def recall(self, records: Sequence[Committed | Deleted]) -> None:
        self.recalled.append([*records])

    def send(self, records: Sequence[AnyRecord]) -> None:
        self.fails -= 1
        if self.fails >= 0:
            raise ConnectionError("down")
        super().send(records)


def test_a_tracker_that_is_down_does_not_have_the_journal_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is opened again and again; each time it learns the checkpoints that it has."""
    monkeypatch.setattr(outbox_module, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(outbox_module, "LONGEST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(outbox_module, "LAST_PAUSE_SECONDS", 0.001)
    decoded = []
    decode = module._record

    def counting(line: bytes) -> AnyRecord:
        decoded.append(line)
        return decode(line)

    monkeypatch.setattr(module, "_record", counting)
    sent = [committed("a"), *map(report, range(FEW)), committed("b"), Deleted(at=1.0, uuid="a")]
    new = [report(FEW), committed("c"), report(FEW + 1)]
    with closing(JournalWriter(tmp_path / JOURNAL)) as journal:
        for record in [*sent, *new]:
            journal.append(record)
    write_state(tmp_path / "a.json", State(run="run", sent=len(sent)))
    tracker = Recalling(fails=4 * outbox_module.REOPENS_AFTER_FAILURES)
    outbox = Outbox("nothing", lambda: tracker, tmp_path / JOURNAL, tmp_path / "a.json", print)
    decoded.clear()
    outbox.thread.start()
    outbox.end()
    outbox.thread.join(60)
    assert tracker.count == len(new)
    assert tracker.recalled == [[sent[0], sent[-2], sent[-1]]] * 5
    assert len(decoded) == len(sent) + len(new)


def test_a_number_that_no_run_reaches_is_damage(tmp_path: Path) -> None:
    """It would stop the sender of each tracker for ever."""
    (tmp_path / JOURNAL).write_bytes(msgspec.json.encode(report(2**63)) + b"\n")
    assert "is damaged" in (set_damaged_aside(tmp_path) or "")
