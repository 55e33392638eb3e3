"""The journal of a trial: all records for its trackers, in order, over all its runs.

The driver appends to it; other processes read it at the same time. It is stored with each
checkpoint, so that a run on another machine continues it::

    journal-{SHA-256}.jsonl   a segment: some earlier records. It never changes, and is stored once
    journal.jsonl             the list of the segments as its first line, then the newest records

A journal without such a line has no segments; the next record divides it if it is long.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.common.decoding import decode, decoder
from trial_core.observe.trackers.records import AnyRecord, Began

FOLDER = "trackers"
"""The folder of the journal, the sender's order and the states, in the trial's folder on this
machine and in the storage."""
PAGE = "report.html"
"""The trial's report as a page, in its folder."""
JOURNAL, ORDER = "journal.jsonl", "order.json"
SEGMENT_BYTES = 2**20
DRIVER_EVENTS = "tensorboard/driver"
"""The folder of the event files that the tracker ``tensorboard`` writes."""

SENDER_LOG = "logs/trackers.log"

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = decoder(AnyRecord)
_EARLIER = b'{"type":"Earlier",'


class State(msgspec.Struct, kw_only=True):
    """The progress of one tracker."""

    run: str = ""  # the tracker's id of the trial's run; empty before it is made
    sent: int = 0  # how many of the journal's records it has


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A part of the journal that is complete."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # the SHA-256 of its file
    records: Annotated[int, msgspec.Meta(ge=1)]  # their number in it

    @property
    def name(self) -> str:
        return f"journal-{self.digest}.jsonl"

    def matches(self, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.digest


class Earlier(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first line of a journal with segments."""

    run: int = 0  # the number of the last run that began in them
    segments: list[Segment] = []  # from the first to the last

    @property
    def records(self) -> int:
        return sum(each.records for each in self.segments)


class JournalWriter:
    """Appends to the journal, from several threads. A last line that is incomplete, because its
    writer was killed, is removed."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._cut(whole)
        self._divides_at = SEGMENT_BYTES

    def close(self) -> None:
        self._file.close()

    def append(self, record: AnyRecord) -> None:
        """Append a record, which readers see at once. After an OSError, as of a full disk, no part
        of it is there. ValueError if a text in it is not Unicode."""
        line = _encoder.encode(record) + b"\n"
        with self._lock:
            before = self._file.tell()
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the line does not fit", self._file.name)
            except OSError:
                self._cut(before)
                raise
            if self._file.tell() > self._divides_at:
                with suppress(OSError, msgspec.MsgspecError):  # the record is there: try later
                    self._divide()
                self._divides_at = self._file.tell() + SEGMENT_BYTES

    def _divide(self) -> None:
        """Move all records to segments, which readers find by the new first line."""
        data = self._path.read_bytes()
        earlier, begin = first_line(data)
        segments = [*earlier.segments]
        for lines in _pieces(data[begin:]):
            segments.append(Segment(hashlib.sha256(lines).hexdigest(), lines.count(b"\n")))
            replace_file(self._path.with_name(segments[-1].name), lines)
        list_of_all = Earlier(run=age(data)[0], segments=segments)
        replace_file(self._path, _encoder.encode(list_of_all) + b"\n")
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def _cut(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)
        self._file.seek(size_bytes)  # else the position stays at the old end


class JournalReader:
    """Reads the complete lines of a journal from its beginning; `count` are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._first = self._offset = 0  # the file that was read last: its first record; and bytes

    def read(self, most: int) -> list[AnyRecord]:
        """The next records, at most `most`; none if the journal does not exist. Raises MsgspecError
        if the next line is damaged or missing, or from a later version."""
        records: list[AnyRecord] = []
        if not self.path.exists():
            return records
        with self.path.open("rb") as newest:
            earlier, begin = first_line(newest.readline())
            first = 0
            try:
                for segment in earlier.segments:
                    if self.count < first + segment.records and len(records) < most:
                        with self.path.with_name(segment.name).open("rb") as file:
                            self._read(file, first, 0, most, records)
                    first += segment.records
                    if self.count < first and len(records) < most:
                        raise msgspec.DecodeError(f"{segment.name} has fewer records")
                if len(records) < most:
                    self._read(newest, first, begin, most, records)
            except (msgspec.MsgspecError, FileNotFoundError) as damage:
                if not records:
                    raise msgspec.DecodeError(str(damage)) from damage
        return records

    def _read(
        self, file: BinaryIO, first: int, begin: int, most: int, records: list[AnyRecord]
    ) -> None:
        """Read more from one file, whose record number `first` is at byte `begin`."""
        if self._first != first:
            file.seek(begin)
            skipped = (len(file.readline()) for _ in range(self.count - first))
            self._first, self._offset = first, sum(skipped)
        file.seek(begin + self._offset)
        while len(records) < most and (line := file.readline()).endswith(b"\n"):
            records.append(_record(line))
            self._offset += len(line)
            self.count += 1


def set_damaged_aside(folder: Path) -> str | None:
    """Move an unreadable journal out of the way. Return its damage, or None if it is readable.

    The states keep their runs, and begin at the new journal's first record. A state that is ahead
    of a readable journal, whose store was cut off, goes back to its end. Raises OSError.
    """
    journal = folder / JOURNAL
    reader, said = JournalReader(journal), None
    count = 0
    try:
        while reader.read(1000):
            pass
        count = reader.count
    except msgspec.MsgspecError as damage:
        journal.replace(folder / f"{JOURNAL}.damaged")
        said = f"{journal} is damaged and was renamed: {damage}"
    for file in folder.glob("*.json"):
        if file.name != ORDER and (state := read_state(file)).sent > count:
            write_state(file, State(run=state.run, sent=count))
    return said


def read_state(path: Path) -> State:
    """A tracker's state; the initial one if the file is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError):
        return decode(path.read_bytes(), State)
    return State()


def write_state(path: Path, state: State) -> None:
    """Replace a tracker's stored state. Raises OSError."""
    replace_file(path, _encoder.encode(state))


def age(data: bytes) -> tuple[int, int]:
    """The key to order copies of a journal, by their file with the newest records: its last run,
    and its length. The newest is greatest. Nothing from a damaged line on is counted."""
    run = count = 0
    with suppress(msgspec.MsgspecError):
        earlier, begin = first_line(data)
        run, count = earlier.run, earlier.records
        for line in data[begin : data.rfind(b"\n") + 1].split(b"\n")[:-1]:
            record = _record(line)
            run = max(run, record.attempt) if isinstance(record, Began) else run
            count += 1
    return run, count


def first_line(data: bytes) -> tuple[Earlier, int]:
    """What a journal's first line says of its segments, and the line's length; 0 if it has none.
    Raises MsgspecError if the line is damaged."""
    line, end, _ = data.partition(b"\n")
    if not end or not line.startswith(_EARLIER):
        return Earlier(), 0
    return decode(line, Earlier), len(line) + 1


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Whole lines, at least `SEGMENT_BYTES` of them; the last piece may be smaller."""
    while lines:
        end = lines.find(b"\n", SEGMENT_BYTES - 1) + 1 or len(lines)
        yield lines[:end]
        lines = lines[end:]


def _record(line: bytes) -> AnyRecord:
    try:
        return _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as damage:
        raise msgspec.DecodeError(str(damage)) from damage
