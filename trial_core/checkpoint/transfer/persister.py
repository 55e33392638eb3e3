"""A rank's connection to its persister process, which uploads and downloads its files.

A separate process does not hold the rank's interpreter lock, and can be killed when it hangs. The
`Persister` starts it when it is first needed, sends it requests and watches its progress. That of a
rank which a fork server has forked is forked ahead, and serves one trial after the other.

It hangs if no bytes are moved within the stall timeout. The process itself is not asked, because it
may be stopped or inside a system call that never returns. The kernel counts the bytes that it reads
and writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.transfer import persister_process
from trial_core.checkpoint.transfer.persister_process import (
    BeginTrial,
    Failed,
    FetchRequest,
    Finished,
    PersisterMessage,
    PersisterReport,
    PersisterRequest,
    Stored,
    UploadRequest,
)
from trial_core.checkpoint.transfer.upload import StagedFile
from trial_core.common.decoding import decoder
from trial_core.common.text_format import first_few
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.processes.machine.child import Child

_logger = logging.getLogger(__name__)

PROCESS = persister_process.__name__

KILL_SECONDS = 10.0
"""How long to wait for a killed process to end: it may be inside a blocking system call."""

PROGRESS_LOG_SECONDS = 300.0
"""How often to log the progress of a long transfer. The rank itself logs nothing meanwhile, and its
driver would count it as hung."""

MIN_PROGRESS_BYTES = 2**20
"""Fewer bytes do not count: logs and event loops write as well. A smaller file counts when the
process reports it as stored."""

POLLS_PER_TIMEOUT = 10

_MAX_POLL_SECONDS = 5.0

_report_decoder: msgspec.json.Decoder[PersisterReport] = decoder(PersisterReport)

_ERRORS: dict[str, type[CheckpointError]] = {
    "storage": StorageError,
    "damage": CheckpointDamaged,
    "invalid": CheckpointError,
}

_starting = threading.Lock()
"""Held while a process is started, taken or given back. A loader worker that is forked meanwhile
would inherit pipes of
`subprocess`, which waits until every copy is closed: until the worker ends."""
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


class Persister:
    """Uploads and fetches in a separate process, which is killed when it has moved nothing for
    `stall_seconds`, unless that is None. For one thread at a time."""

    def __init__(self, stall_seconds: float | None = None) -> None:
        self._stall_seconds = stall_seconds
        self._process: _Process | None = None
        self._stored: dict[str, dict[StoredPath, FileEntry]] = {}

    def upload(
        self,
        storage: StorageSpec,
        uuid: str,
        rank: int,
        files: list[StagedFile],
        shared: Sequence[FileEntry] = (),
    ) -> list[FileEntry]:
        """Upload this rank's files of a checkpoint, as `upload_staged`; return their entries. May
        be called again after an error: files that are stored already are skipped.

        Raises:
            StorageError: the storage failed, the process died, or it hung and was killed.
            CheckpointError: a file changed meanwhile.
        """
        stored = self._stored.setdefault(uuid, {})

        def note(entry: FileEntry) -> None:
            stored[entry.path] = entry

        request = UploadRequest(
            storage=storage, uuid=uuid, rank=rank, files=files, shared=[*shared],
            stored=[*stored.values()],
        )  # fmt: skip
        try:
            return self._request(request, note).files
        except _ProcessEnded as end:
            left = [file.path for file in files if file.path not in stored]
            raise StorageError(
                f"the process that uploads its files {end}; not stored: {first_few(left)}"
            ) from None

    def fetch(self, storage: StorageSpec, uuid: str, files: list[FileEntry], target: Path) -> int:
        """Bring files of a checkpoint to this machine, as `fetch_files`; return the bytes fetched.
        Raises StorageError also if the process died, or hung and was killed."""
        request = FetchRequest(storage=storage, uuid=uuid, files=files, target=str(target))
        try:
            return self._request(request, lambda entry: None).fetched_bytes
        except _ProcessEnded as end:
            paths = [str(file.path) for file in files]
            raise StorageError(
                f"the process that fetches its files {end}; files to fetch: {first_few(paths)}"
            ) from None

    def forget(self, uuid: str) -> None:
        """Forget the stored files of a checkpoint that is committed or abandoned."""
        self._stored.pop(uuid, None)

    def close(self) -> None:
        """Kill the process; one that was forked ahead is kept for the next trial, if it is idle."""
        global _forked
        with _starting:
            process, self._process = self._process, None
            if process is None:
                return
            if process.environment is not None and not process.is_busy:
                _forked = process
                return
        process.end()

    def _request(
        self, request: PersisterRequest, on_stored: Callable[[FileEntry], None]
    ) -> Finished:
        last = None
        with _starting:
            process = self._process = self._process or _take_process()
            process.is_busy = True
        watch = StallWatch(process.pid, self._stall_seconds, process.kill)
        try:
            with watch:
                for report in process.reports(request):
                    watch.note_report()
                    if not isinstance(report, Stored):
                        last = report
                        break
                    on_stored(report.file)
        finally:
            # Also after an interrupt of this thread: later reports would be taken as the answer to
            # the next request.
            if last is None or watch.has_stalled:
                self.close()
            else:
                process.is_busy = False
        if isinstance(last, Failed):
            raise _ERRORS[last.kind](last.message)
        if last is not None:
            return last
        raise _ProcessEnded(watch.stall_message or process.how_it_ended())


def fork_ahead(prepare: Callable[[], None]) -> None:
    """Fork this rank's persister process, which then imports nothing, and calls `prepare` first.

    Only in a process with one thread: a rank that a fork server has just forked.
    """
    global _forked
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = os.fork()
        except OSError:  # too many processes: one is started when it is needed
            ours.close()
            return
        if pid == 0:
            ours.close()
            _serve(theirs, prepare)
        _forked = _Process(Child.of_fork(pid), ours, {**os.environb})


def _serve(connection: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        prepare()
        persister_process.serve_rank(connection)
    except BaseException:
        _logger.exception("the persister failed and exits")
    finally:
        os._exit(1)


class _ProcessEnded(Exception):
    """The process has ended; the message says how. Never leaves the `Persister`."""


class _Process:
    """A persister process.

    Attributes:
        environment: its own, if it was forked ahead, and can serve other trials; else None.
        is_busy: whether its answer to a request is awaited.
    """

    def __init__(
        self,
        child: Child,
        connection: socket.socket,
        environment: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self._child, self._socket = child, connection
        self._stream = connection.makefile("rwb")
        self.pid = child.pid
        self.environment = environment
        self.is_busy = False

    def begin_trial(self) -> None:
        """Let it begin with the rank's present environment, which a new interpreter has."""
        if self.environment is not None:
            self._send(BeginTrial(_changes(self.environment)))
            self.environment = {**os.environb}

    def lives(self) -> bool:
        return self._child.lives()

    def reports(self, request: PersisterRequest) -> Iterator[PersisterReport]:
        """Send a request; yield the reports, until the process ends."""
        self._send(request)
        with contextlib.suppress(OSError):  # the connection of a process that has ended
            for line in self._stream:
                if not line.endswith(b"\n"):
                    return  # the process ended within this line
                yield _report_decoder.decode(line)

    def _send(self, message: PersisterMessage) -> None:
        with contextlib.suppress(OSError):  # it has ended, as `reports` finds
            self._stream.write(msgspec.json.encode(message) + b"\n")
            self._stream.flush()

    def kill(self) -> None:
        """Kill the process and end `reports`, also if the process cannot end. From any thread."""
        self._child.kill_only()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Kill the process and wait until it has ended, if it can."""
        self.kill()  # a process that is ending already keeps its exit code
        with contextlib.suppress(OSError):  # unsent bytes
            self._stream.close()
        self._socket.close()
        if not self._child.kill(KILL_SECONDS):
            _logger.warning(
                "the persister (process %d) was killed %g s ago and has not ended: it is inside a "
                "system call; check this machine's disks",
                self.pid, KILL_SECONDS,
            )  # fmt: skip

    def how_it_ended(self) -> str:
        """The text that follows "the process": how it ended. Call after `end`."""
        code = self._child.exit_code
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"was killed by {name}; if you did not kill it, check whether memory ran out"
        return f"ended with exit code {code}; see this rank's log"


_forked: _Process | None = None
"""The process that was forked ahead, while no `Persister` has it."""


def _take_process() -> _Process:
    """The process that was forked ahead, if it is free, or a new one. Call with `_starting`."""
    global _forked
    process, _forked = _forked, None
    if process is not None and not process.lives():  # it was killed between two trials
        process.end()
        process = None
    if process is None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = ["-m", PROCESS, str(theirs.fileno())]
            child = Child(command, descriptors=[theirs.fileno()], own_session=False)
        process = _Process(child, ours)
    process.begin_trial()
    return process


class StallWatch:
    """A context manager that watches a process while it works, and calls `on_stall` once, on its
    thread, when the stall timeout is over. Without a timeout, it only logs the progress."""

    def __init__(
        self, pid: int, timeout_seconds: float | None, on_stall: Callable[[], None]
    ) -> None:
        self.has_stalled = False
        self._pid = pid
        self._timeout_seconds = timeout_seconds
        self._on_stall = on_stall
        self._reports = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def stall_message(self) -> str | None:
        """The text that follows "the process": that it stalled. None if it has not."""
        if not self.has_stalled:
            return None
        return (
            f"has moved nothing for {self._timeout_seconds:g} s "
            "(checkpointing.stall_timeout_seconds) and was killed: check why the storage, or a "
            "disk of this machine, does not answer"
        )

    def note_report(self) -> None:
        self._reports += 1

    def _watch(self) -> None:
        timeout = self._timeout_seconds
        poll_seconds = (
            _MAX_POLL_SECONDS
            if timeout is None
            else min(_MAX_POLL_SECONDS, timeout / POLLS_PER_TIMEOUT)
        )
        # Count polls, not seconds: both processes may have been stopped for a while.
        idle_polls, seen = 0, (self._reports, self._moved_bytes() or 0)
        logged_at = time.monotonic()
        while not self._is_over.wait(poll_seconds):
            reports, moved_bytes = self._reports, self._moved_bytes()
            if moved_bytes is None:
                continue  # not counted on this system, or the process has ended
            if reports == seen[0] and moved_bytes < seen[1] + MIN_PROGRESS_BYTES:
                idle_polls += 1
                if timeout is not None and idle_polls * poll_seconds >= timeout:
                    self.has_stalled = True
                    self._on_stall()
                    return
                continue
            idle_polls, seen = 0, (reports, moved_bytes)
            if time.monotonic() >= logged_at + PROGRESS_LOG_SECONDS:
                logged_at = time.monotonic()
                _logger.info(
                    "a checkpoint transfer is still running: the persister has read and written "
                    "%.1f GiB so far", moved_bytes / 2**30,
                )  # fmt: skip

    def _moved_bytes(self) -> int | None:
        """The bytes that the process has read and written so far; None if unknown."""
        try:
            counters = psutil.Process(self._pid).io_counters()
        except (psutil.Error, AttributeError):  # AttributeError: not on Linux
            return None
        return int(counters.read_chars + counters.write_chars)


def _changes(before: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes | None]]:
    """The changed environment variables; None for a removed one."""
    now = os.environb
    changed = [(name, value) for name, value in now.items() if before.get(name) != value]
    return [*changed, *((name, None) for name in before.keys() - now.keys())]
