"""The ranks' logs: the run's logger receives a limited number of lines, the storage receives all.

Prefect stores every line in its database, and a trial that prints a line per batch would fill it.
The complete log files are stored with the run's other files, below ``runs/{trial}``.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.run_files import TENSORBOARD, tensorboard_url, upload_copy
from trial_core.observe.report.run_updates import PROGRESS

BURST_LINES = 500
LINES_PER_SECOND = 5.0

# A file up to this size is uploaded after every checkpoint; a larger one only after it has grown by
# half. So a log is uploaded at most three times over, and once more at the end.
SMALL_BYTES = 2**20
GROWTH = 1.5

PLACE = "logs-place"
"""The file of a run's folder that has the name of its log folder in the storage."""


class LogLimit:
    """A token bucket of log lines: a burst, then a few per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = float(BURST_LINES)
        self._at = clock()
        self._dropped = 0

    def allows(self) -> bool:
        """True if the next line is logged; if not, it is counted as dropped."""
        now = self._clock()
        self._budget = min(BURST_LINES, self._budget + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._budget < 1:
            self._dropped += 1
            return False
        self._budget -= 1
        return True

    def dropped(self) -> int:
        """How many lines were dropped since the last call."""
        count, self._dropped = self._dropped, 0
        return count


class LogLimits:
    """Separate limits for rank 0's output, its warnings, and the warnings of the other ranks, which
    send nothing else. None of them uses up another's budget."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._warnings, self._others = (LogLimit(clock) for _ in range(3))

    def allows(self, rank: int, is_warning: bool) -> bool:
        if rank != 0:
            return self._others.allows()
        return (self._warnings if is_warning else self._output).allows()

    def dropped(self) -> int:
        return sum(limit.dropped() for limit in (self._output, self._warnings, self._others))


class StoredLogs:
    """Uploads a run's logs, and a few other files of the run.

    Logs of several machines, or of a machine whose disk was erased, must not overwrite each other.
    So each log folder has its own name in the storage, with the time and the host of its first
    upload.

    Args:
        run_dir: the trial's folder on this machine; its logs are in ``logs``.
        other_files: patterns of files in `run_dir` that are uploaded too, and overwritten.
    """

    def __init__(
        self, store: CheckpointStore, trial: str, run_dir: Path, other_files: tuple[str, ...]
    ) -> None:
        self._store = store
        self._trial = trial
        self._run_dir = run_dir
        self._other_files = other_files
        self._logs = run_dir / "logs"
        self._folder = _stored_folder(run_dir / PLACE)
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._stop = CancelSignal()
        self._storing = threading.Lock()

    def locations(self, title: str, name: str) -> dict[str, str]:
        """The places of another file, by its title, and of the logs: in the storage, and here."""
        here = f"on {socket.gethostname()}"
        local = {f"{title} {here}": str(self._run_dir / name), f"Logs {here}": str(self._logs)}
        if self._store.is_process_local:  # it ends with this process: nothing is stored there
            return local
        run = f"{self._store.url}/{layout.run_folder(self._trial)}"
        return {title: f"{run}/{name}", "Logs": f"{run}/{self._folder}", **local}

    def stored(self, name: str) -> bytes | None:
        """The stored content of one of the other files, from any run. Raises StorageError."""
        return self._store.storage.read(layout.run_file_key(self._trial, name))

    def tensorboard(self) -> str | None:
        """The place of the trial's TensorBoard files, or None. Raises StorageError."""
        # A trial without such files does not cost a request.
        if self._store.is_process_local or not (self._run_dir / TENSORBOARD).exists():
            return None
        folder = layout.run_file_key(self._trial, TENSORBOARD)
        has_files = bool(self._store.storage.sizes(folder))
        return tensorboard_url(self._store, self._trial) if has_files else None

    def cut_short(self) -> None:
        """Make running calls of `store` return soon."""
        stop, self._stop = self._stop, CancelSignal()
        stop.set()

    def store(self, is_final: bool = False) -> None:
        """Upload the files that have changed enough; all of them, once the ranks have ended.

        Raises:
            StorageError: the storage failed. The next call tries again.
            OSError: a log cannot be copied.
        """
        stop = self._stop  # the present one: `cut_short` may be called while this waits
        if self._store.is_process_local:
            return
        with self._storing, contextlib.suppress(WorkCancelled):  # the rest stays on this machine
            # Small ones first: a run that stops has only seconds for them.
            for path, name in sorted(self._files(), key=lambda file: file[0].stat().st_size):
                status = path.stat()
                size_bytes, uploaded = status.st_size, self._uploaded.get(path, (0, 0))
                version = (size_bytes, status.st_mtime_ns)
                has_grown = size_bytes <= SMALL_BYTES or size_bytes >= uploaded[0] * GROWTH
                if size_bytes and version != uploaded and (has_grown or is_final):
                    key = layout.run_file_key(self._trial, name)
                    upload_copy(self._store, path, key, self._run_dir / "staging", stop)
                    self._uploaded[path] = version

    def _files(self) -> Iterator[tuple[Path, str]]:
        for pattern in self._other_files:
            for path in sorted(self._run_dir.glob(pattern)):
                yield path, path.relative_to(self._run_dir).as_posix()
        for path in sorted(self._logs.glob("*.log")):
            if layout.is_file_path(path.name):
                yield path, f"{self._folder}/{path.name}"


def stored_name(run_dir: Path, file: Path) -> str | None:
    """The key of a file of a run's folder, below the run's folder in the storage; None if it is not
    stored, because only this machine needs it."""
    if file.parts[0] != "logs":
        return None if file.name in (PLACE, PROGRESS) else file.as_posix()
    place = run_dir / PLACE
    return f"{place.read_text()}/{file.name}" if place.exists() else file.as_posix()


def _stored_folder(name_file: Path) -> str:
    """The stored log folder below the run's folder; remembered in `name_file`."""
    with contextlib.suppress(OSError):
        if folder := name_file.read_text():  # empty after a full disk or a crash
            return folder
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    folder = f"logs/{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{host}"
    with contextlib.suppress(OSError):  # a full disk: the next run uses another folder
        replace_file(name_file, folder.encode())
    return folder
