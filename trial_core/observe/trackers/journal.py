"""The journal of a trial: all records for its trackers, in order, over all its runs.

The driver appends to it; other processes read it at the same time. It is stored with each
checkpoint, so that a run on another machine continues it.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from pathlib import Path

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
DRIVER_EVENTS = "tensorboard/driver"
"""The folder of the event files that the tracker ``tensorboard`` writes."""

SENDER_LOG = "logs/trackers.log"

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = decoder(AnyRecord)


class State(msgspec.Struct, kw_only=True):
    """The progress of one tracker.

    Attributes:
        run: the tracker's id of the trial's run; empty before it is made.
        sent: how many of the journal's records it has.
    """

    run: str = ""
    sent: int = 0


class JournalWriter:
    """Appends to the journal. Several threads may append.

    A last line that is incomplete, because its writer was killed, is removed.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._cut(whole)

    def close(self) -> None:
        self._file.close()

    def append(self, record: AnyRecord) -> None:
        """Append a record, which readers see at once.

        Raises:
            OSError: for example, the disk is full. No part of the record is written.
            ValueError: it has a text that is not Unicode.
        """
        line = _encoder.encode(record) + b"\n"
        with self._lock:
            before = self._file.tell()
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the line does not fit", self._file.name)
            except OSError:
                self._cut(before)
                raise

    def _cut(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)
        self._file.seek(size_bytes)  # else the position stays at the old end


class JournalReader:
    """Reads the complete lines of a journal from its beginning; `count` are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.count = 0

    def read(self, most: int) -> list[AnyRecord]:
        """The next records, at most `most`; none if the journal does not exist.

        Raises:
            msgspec.MsgspecError: the next line is damaged, or from a later version.
        """
        if not self.path.exists():
            return []
        records: list[AnyRecord] = []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if len(records) == most or not line.endswith(b"\n"):
                    break
                try:
                    records.append(_record(line))
                except msgspec.MsgspecError:
                    if not records:
                        raise
                    break
                self._offset += len(line)
        self.count += len(records)
        return records


def set_damaged_aside(folder: Path) -> str | None:
    """Move an unreadable journal out of the way. Return its damage, or None if it is readable.

    The states keep their runs, and begin at the new journal's first record. Raises OSError.
    """
    journal = folder / JOURNAL
    reader = JournalReader(journal)
    try:
        while reader.read(1000):
            pass
    except msgspec.MsgspecError as damage:
        journal.replace(folder / f"{JOURNAL}.damaged")
        for file in folder.glob("*.json"):
            if file.name != ORDER:
                write_state(file, State(run=read_state(file).run))
        return f"{journal} is damaged and was renamed: {damage}"
    return None


def read_state(path: Path) -> State:
    """A tracker's state; the initial one if the file is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError):
        return decode(path.read_bytes(), State)
    return State()


def write_state(path: Path, state: State) -> None:
    """Replace a tracker's stored state. Raises OSError."""
    replace_file(path, _encoder.encode(state))


def age(data: bytes) -> tuple[int, int]:
    """The key to order copies of a journal: its last run, and its length. The newest is greatest.

    Nothing from a damaged line on is counted.
    """
    run = count = 0
    with suppress(msgspec.MsgspecError):
        for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
            record = _record(line)
            run = max(run, record.attempt) if isinstance(record, Began) else run
            count += 1
    return run, count


def _record(line: bytes) -> AnyRecord:
    try:
        return _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as damage:
        raise msgspec.DecodeError(str(damage)) from damage
