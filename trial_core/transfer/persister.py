"""Uploads and fetches in a process of their own: none holds a rank's interpreter lock, and one that
hangs can be ended.

A rank has one `Persister`, which starts the process when it is first needed, sends it jobs, and
watches that it gets on.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from trial_core.checkpoint.manifest import FileEntry
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.storage.base import StorageSpec
from trial_core.transfer import persister_process
from trial_core.transfer.persister_process import (
    Failed,
    FetchRequest,
    Finished,
    Job,
    Report,
    StagedFile,
    Stored,
    UploadRequest,
)
from trial_core.transfer.stall_watch import STALL_SECONDS, StallWatch

_logger = logging.getLogger(__name__)

PROCESS = persister_process.__name__

KILL_SECONDS = 10.0
"""How long to wait for the end of a process that was killed: it may be inside a call of the
system's that returns when a disk does."""

_SHOWN = 3

_ERRORS: dict[str, type[CheckpointError]] = {
    "storage": StorageError,
    "damage": CheckpointDamaged,
    "mistake": CheckpointError,
}


class Persister:
    """A rank's end of the process that moves its files. For one thread at a time.

    Args:
        stall_seconds: for how long that may move nothing before it is ended; None: for ever.
    """

    def __init__(self, stall_seconds: float | None = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._process: _Process | None = None
        self._stored: dict[str, dict[str, FileEntry]] = {}

    def upload(
        self, storage: StorageSpec, uuid: str, rank: int, files: list[StagedFile]
    ) -> list[FileEntry]:
        """Upload this rank's files of a checkpoint; what its manifest must say of them.

        May be called again after an error: what had been stored by then is not sent again.

        Raises:
            StorageError: the storage failed; or the process ended, or was ended since it hung.
            CheckpointError: a file changed meanwhile.
        """
        stored = self._stored.setdefault(uuid, {})

        def note(entry: FileEntry) -> None:
            stored[entry.path] = entry

        job = UploadRequest(
            storage=storage, uuid=uuid, rank=rank, files=files, stored=[*stored.values()]
        )
        try:
            return self._carry_out(job, note).files
        except _Ended as end:
            left = [file.path for file in files if file.path not in stored]
            raise StorageError(
                f"the process that uploads its files {end}; {_some(left)} not stored"
            ) from None

    def fetch(
        self,
        storage: StorageSpec,
        uuid: str,
        files: list[FileEntry],
        target: Path,
        local: Sequence[Path] = (),
    ) -> int:
        """Bring files of a checkpoint to this machine, as `fetch_files` does; how many bytes came
        from the storage.

        Raises:
            CheckpointDamaged: a file is missing or differs.
            StorageError: the storage failed; or the process ended, or was ended since it hung.
        """
        folders = [str(folder) for folder in local]
        job = FetchRequest(
            storage=storage, uuid=uuid, files=files, target=str(target), local=folders
        )
        try:
            return self._carry_out(job, lambda entry: None).fetched_bytes
        except _Ended as end:
            paths = [file.path for file in files]
            raise StorageError(
                f"the process that fetches its files {end}; it was to fetch {_some(paths)}"
            ) from None

    def forget(self, uuid: str) -> None:
        """A checkpoint is committed, or given up: what was stored of it need not be known."""
        self._stored.pop(uuid, None)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _carry_out(self, job: Job, on_stored: Callable[[FileEntry], None]) -> Finished:
        if self._process is None:
            self._process = _Process()
        process, last = self._process, None
        watch = StallWatch(process.pid, self._stall_seconds, process.kill)
        try:
            with watch:
                for report in process.reports(job):
                    watch.note_sign()
                    if not isinstance(report, Stored):
                        last = report
                        break
                    on_stored(report.file)
        finally:
            # Also where this thread was interrupted: what is still to be said of this job must not
            # be taken for the next one's.
            if last is None or watch.has_stalled:
                self.close()
        if isinstance(last, Failed):
            raise _ERRORS[last.kind](last.message)
        if last is not None:
            return last
        raise _Ended(watch.verdict or process.how_it_ended())


class _Ended(Exception):
    """The process has ended; the message says how. Never leaves the `Persister`."""


class _Process:
    """The process, and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._stream = ours.makefile("rwb")
        self.pid = self._popen.pid

    def reports(self, job: Job) -> Iterator[Report]:
        """What it says of a job, until the process has said all, or has ended."""
        with contextlib.suppress(OSError):  # the connection of a process that has ended
            self._stream.write(msgspec.json.encode(job) + b"\n")
            self._stream.flush()
            for line in self._stream:
                if not line.endswith(b"\n"):
                    return  # it ended while it said this
                yield msgspec.json.decode(line, type=Report)

    def kill(self) -> None:
        """End it as it is; nobody waits for it any more, even if it cannot end. From any thread."""
        self._popen.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it, and wait until it has, if it can."""
        self.kill()  # one that is ending already keeps its own exit code
        with contextlib.suppress(OSError):  # what it never took
            self._stream.close()
        self._socket.close()
        try:
            self._popen.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            _logger.warning(
                "process %d, which moved this rank's files, was killed %g s ago and has not ended: "
                "it is inside a call of the system's; look at the disks",
                self.pid, KILL_SECONDS,
            )  # fmt: skip

    def how_it_ended(self) -> str:
        """In words; after `end`."""
        code = self._popen.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}; if that was not you, look whether memory ran out"
        return f"ended with exit code {code}; see this rank's log"


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
