"""The journal of a trial: what its trackers are told, in order, over all its runs.

The driver appends to it; other processes read it at the same time. It is stored with each
checkpoint, so that a run on another machine continues it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import msgspec
from typing_extensions import Self

from trial_core.trackers.records import AnyRecord, Began

FOLDER = "trackers"
"""The folder of the journal, the sender's order and the states, in the trial's folder on this
machine and in the storage."""
JOURNAL, ORDER = "journal.jsonl", "order.json"
DRIVER_EVENTS = "tensorboard/driver"
"""The folder of the event files that the tracker ``tensorboard`` writes."""

STORED = (f"{FOLDER}/*.json", f"{FOLDER}/{JOURNAL}", f"{DRIVER_EVENTS}/*")
"""What is stored of the trial's folder. States before the journal: they must not be ahead of it."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyRecord)


class State(msgspec.Struct, kw_only=True):
    """What one tracker has.

    Attributes:
        run: the id of the trial's run there; empty: none is made yet.
        sent: how many of the journal's records it has got.
    """

    run: str = ""
    sent: int = 0


class JournalWriter:
    """Appends to the journal. A context manager; several threads may append.

    A last line that is incomplete, because its writer was killed, is removed.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        end = self._file.seek(0, 2)
        if end and (whole := _whole_bytes(path)) < end:
            self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._file.close()

    def append(self, record: AnyRecord) -> None:
        """Append a record, which readers see at once. Raises OSError."""
        with self._lock:
            self._file.write(_encoder.encode(record) + b"\n")
            self._file.flush()


class JournalReader:
    """Reads the complete lines of a journal, from its beginning.

    Attributes:
        count: how many records were read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.count = 0

    def read(self, most: int) -> list[AnyRecord]:
        """The next records, at most so many; none if there is no journal.

        Raises:
            msgspec.MsgspecError: the journal is damaged, or of a later version.
        """
        if not self._path.exists():
            return []
        records: list[AnyRecord] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if len(records) == most or not line.endswith(b"\n"):
                    break
                records.append(_decoder.decode(line))
                self._offset += len(line)
        self.count += len(records)
        return records


def age(data: bytes) -> tuple[int, int]:
    """What orders the copies of a journal: its last run, and its length; the greatest is newest.

    Raises:
        msgspec.MsgspecError: it is damaged.
    """
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    runs = [record.attempt for line in lines if isinstance(record := _decoder.decode(line), Began)]
    return max(runs, default=0), len(lines)


def _whole_bytes(path: Path) -> int:
    """Where the last complete line ends."""
    return path.read_bytes().rfind(b"\n") + 1
