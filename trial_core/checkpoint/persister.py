"""Uploads in a process of their own, so that they never hold a rank's interpreter lock.

A rank has one `Persister`, which starts the process when it is first needed and sends it jobs. The
process imports neither torch nor deepspeed; it opens the rank's staged files by their paths (images
in memory too, see `images`), reports each file as it is stored, and ends with its rank.

Messages are JSON, a line each; credentials travel in them and nowhere else.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BufferedRWPair
from pathlib import Path

import msgspec

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage import StorageSpec
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import Source, upload_sources
from trial_core.errors import CheckpointError, StorageError

NICENESS = 5
"""Where cores are scarce, training goes first."""


class StagedFile(msgspec.Struct, frozen=True):
    """A file to upload: what it is called in the checkpoint, and where it is now."""

    path: str
    file: str
    size_bytes: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a checkpoint.

    Attributes:
        files: what to upload.
        stored: what an earlier try has stored already.
    """

    storage: StorageSpec
    uuid: str
    rank: int
    files: list[StagedFile]
    stored: list[FileEntry]


class Stored(msgspec.Struct, frozen=True, tag=True):
    """One file has been stored."""

    file: FileEntry


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All files of a job have been stored."""

    files: list[FileEntry]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job has failed; `storage_failed` tells whether to try it again may help."""

    message: str
    storage_failed: bool


Report = Stored | Finished | Failed


class Persister:
    """A rank's end of its uploading process. For one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: BufferedRWPair | None = None
        self._stored: dict[str, dict[str, FileEntry]] = {}

    def upload(
        self, storage: StorageSpec, uuid: str, rank: int, files: list[StagedFile]
    ) -> list[FileEntry]:
        """Upload this rank's files of a checkpoint; what its manifest must say of them.

        May be called again after an error: what had been stored by then is not sent again.

        Raises:
            StorageError: the storage failed, or the process ended.
            CheckpointError: a file changed meanwhile.
        """
        stored = self._stored.setdefault(uuid, {})
        job = Job(storage=storage, uuid=uuid, rank=rank, files=files, stored=[*stored.values()])
        try:
            for report in self._reports(job):
                if isinstance(report, Stored):
                    stored[report.file.path] = report.file
                elif isinstance(report, Failed):
                    raise (StorageError if report.storage_failed else CheckpointError)(
                        report.message
                    )
                else:
                    return report.files
        except OSError:
            pass  # the connection of a process that has ended
        raise StorageError(f"the process that uploads its files {self._how_it_ended()}")

    def forget(self, uuid: str) -> None:
        """A checkpoint is committed, or given up: what was stored of it need not be known."""
        self._stored.pop(uuid, None)

    def close(self) -> None:
        """End the process."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _reports(self, job: Job) -> Iterator[Report]:
        stream = self._started()
        stream.write(msgspec.json.encode(job) + b"\n")
        stream.flush()
        for line in stream:
            yield msgspec.json.decode(line, type=Report)

    def _started(self) -> BufferedRWPair:
        if self._stream is None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
                self._stream = ours.makefile("rwb")
        return self._stream

    def _how_it_ended(self) -> str:
        code = self._process.wait() if self._process is not None else 0
        self.close()
        if code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}; if that was not you, look whether memory ran out"
        return f"ended with exit code {code}; see this rank's log"


def serve(stream: BufferedRWPair) -> None:
    """Carry out jobs until the rank is gone; then end at once."""
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def work() -> None:
        while True:
            job = msgspec.json.decode(jobs.get(), type=Job)
            _report(stream, _carry_out(job, stream))

    threading.Thread(target=work, name="upload", daemon=True).start()
    for line in stream:
        jobs.put(line)
    os._exit(0)


def _carry_out(job: Job, stream: BufferedRWPair) -> Report:
    try:
        entries = upload_sources(
            CheckpointStore.from_spec(job.storage),
            job.uuid,
            [Source(each.path, Path(each.file), each.size_bytes) for each in job.files],
            job.rank,
            stored={entry.path: entry for entry in job.stored},
            on_stored=lambda entry: _report(stream, Stored(entry)),
        )
    except CheckpointError as error:
        return Failed(str(error), isinstance(error, StorageError))
    return Finished(entries)


_reporting = threading.Lock()


def _report(stream: BufferedRWPair, report: Report) -> None:
    with _reporting:
        stream.write(msgspec.json.encode(report) + b"\n")
        stream.flush()


def main() -> None:
    """Serve the rank at the other end of the connection whose descriptor is the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [upload] %(message)s")
    os.nice(NICENESS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    serve(connection.makefile("rwb"))


if __name__ == "__main__":
    main()
