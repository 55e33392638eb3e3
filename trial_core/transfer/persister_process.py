"""The process that moves a rank's files: what it is asked, what it answers, and what it does.

It imports neither torch nor deepspeed; it opens the rank's staged files by their paths (images in
memory too, see `images`), reports each file as it is stored, and ends with its rank.

Messages are JSON, a line each; credentials travel in them and nowhere else.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from io import BufferedRWPair
from pathlib import Path
from typing import Literal

import msgspec

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.storage.base import StorageSpec
from trial_core.transfer.files import Source, fetch_files, upload_sources

_logger = logging.getLogger(__name__)

NICENESS = 5
"""Where cores are scarce, training goes first."""


class StagedFile(msgspec.Struct, frozen=True):
    """A file to upload: what it is called in the checkpoint, and where it is now."""

    path: str
    file: str
    size_bytes: int


class UploadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's part of a checkpoint, to be stored.

    Attributes:
        files: what to upload.
        stored: what an earlier try has stored already.
    """

    storage: StorageSpec
    uuid: str
    rank: int
    files: list[StagedFile]
    stored: list[FileEntry]


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Files of a checkpoint, to be brought to this machine.

    Attributes:
        target: the folder that they are brought to.
        local: folders that may hold them already.
    """

    storage: StorageSpec
    uuid: str
    files: list[FileEntry]
    target: str
    local: list[str]


Job = UploadRequest | FetchRequest


class Stored(msgspec.Struct, frozen=True, tag=True):
    """One file has been stored."""

    file: FileEntry


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All files of a job are where they belong.

    Attributes:
        files: what the manifest must say of those that were stored.
        fetched_bytes: how much was fetched.
    """

    files: list[FileEntry] = []
    fetched_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job has failed. The kind tells what may help: to try again, another checkpoint, neither."""

    message: str
    kind: Literal["storage", "damage", "mistake"]


Report = Stored | Finished | Failed


def serve(stream: BufferedRWPair) -> None:
    """Carry out jobs until the rank is gone; then end at once."""
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def work() -> None:
        try:
            while True:
                job = msgspec.json.decode(jobs.get(), type=Job)
                _report(stream, _carry_out(job, stream))
        except BaseException:  # the top frame of the thread, for whose end the rank would wait
            _logger.exception("this process cannot go on")
            os._exit(1)

    threading.Thread(target=work, name="files", daemon=True).start()
    for line in stream:
        jobs.put(line)
    os._exit(0)


def _carry_out(job: Job, stream: BufferedRWPair) -> Report:
    try:
        return _upload(job, stream) if isinstance(job, UploadRequest) else _fetch(job)
    except StorageError as error:
        return Failed(str(error), "storage")
    except CheckpointDamaged as error:
        return Failed(str(error), "damage")
    except CheckpointError as error:
        return Failed(str(error), "mistake")


def _upload(job: UploadRequest, stream: BufferedRWPair) -> Finished:
    entries = upload_sources(
        CheckpointStore.from_spec(job.storage),
        job.uuid,
        [Source(each.path, Path(each.file), each.size_bytes) for each in job.files],
        job.rank,
        stored={entry.path: entry for entry in job.stored},
        on_stored=lambda entry: _report(stream, Stored(entry)),
    )
    return Finished(files=entries)


def _fetch(job: FetchRequest) -> Finished:
    store, local = CheckpointStore.from_spec(job.storage), [Path(each) for each in job.local]
    fetched = fetch_files(store, job.uuid, job.files, Path(job.target), local=local)
    return Finished(fetched_bytes=fetched)


_reporting = threading.Lock()


def _report(stream: BufferedRWPair, report: Report) -> None:
    with _reporting:
        stream.write(msgspec.json.encode(report) + b"\n")
        stream.flush()


def main() -> None:
    """Serve the rank at the other end of the connection whose descriptor is the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [storage] %(message)s")
    os.nice(NICENESS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    serve(connection.makefile("rwb"))


if __name__ == "__main__":
    main()
