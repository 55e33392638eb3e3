"""The ranks' logs: how much of them reaches Prefect, and all of them in the storage.

Prefect keeps every line in its database, so a trial that prints a line a batch would fill it. The
ranks' files hold everything; they lie with the run's other files, below ``runs/{trial}``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.parallel import StopSignal, WorkCancelled
from trial_core.transfer.run_files import TENSORBOARD, tensorboard_url

BURST_LINES = 500
LINES_PER_SECOND = 5.0

# Up to this size a file goes with every checkpoint, beyond it once it has grown by a half: however
# long the run, a log is sent at most three times over, and once more at the end.
SMALL_BYTES = 2**20
GROWTH = 1.5

LAST_SECONDS = 60.0
# A run that is being stopped has only so long until its process is killed.
HURRIED_SECONDS = 3.0


class LogCap:
    """How many lines of the ranks' logs Prefect is given: a burst, then a few a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = float(BURST_LINES)
        self._at = clock()
        self._left_out = 0

    def admits(self) -> bool:
        """Whether the next line is to be shown; counted as left out if not."""
        now = self._clock()
        self._budget = min(BURST_LINES, self._budget + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._budget < 1:
            self._left_out += 1
            return False
        self._budget -= 1
        return True

    def left_out(self) -> int:
        """How many lines were left out since this was last asked."""
        count, self._left_out = self._left_out, 0
        return count


class LogCaps:
    """The budgets of a run's log lines, none of which another one uses up: rank 0's output, what
    alarms in it, and the other ranks', of which nothing but what alarms comes here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._alarms, self._others = LogCap(clock), LogCap(clock), LogCap(clock)

    def admits(self, rank: int, is_alarming: bool) -> bool:
        """Whether the next line is to be shown; counted as left out if not."""
        if rank != 0:
            return self._others.admits()
        return (self._alarms if is_alarming else self._output).admits()

    def left_out(self) -> int:
        """How many lines were left out since this was last asked."""
        return sum(cap.left_out() for cap in (self._output, self._alarms, self._others))


class StoredLogs:
    """Brings the logs in a run's folder to the storage, and a few files beside them.

    Logs of several machines, or of an emptied disk, must not overwrite each other: each folder of
    logs has a place of its own, named by when and where it was first stored.

    Args:
        run_dir: the trial's folder on this machine; its logs are in ``logs``.
        beside: names of files in `run_dir` that go with them, and are replaced.
    """

    def __init__(
        self, store: CheckpointStore, trial: str, run_dir: Path, beside: tuple[str, ...]
    ) -> None:
        self._store = store
        self._trial = trial
        self._run_dir = run_dir
        self._beside = beside
        self._logs = run_dir / "logs"
        self._place = _place(run_dir / "logs-place")
        self._sent: dict[Path, tuple[int, int]] = {}
        self._stop = StopSignal()

    def places(self) -> dict[str, str]:
        """Where the logs are, for people: in the storage, and here."""
        here = {f"Logs on {socket.gethostname()}": str(self._logs)}
        if self._store.is_process_local:  # gone with this process: nothing is stored there
            return here
        run = f"{self._store.url}/{layout.run_folder(self._trial)}"
        return {"Logs": f"{run}/{self._place}", **here}

    def stored(self, name: str) -> bytes | None:
        """A file that was stored beside the logs, by this run or an earlier one.

        Raises:
            StorageError: the storage failed.
        """
        return self._store.storage.read(layout.run_file_key(self._trial, name))

    def tensorboard(self) -> str | None:
        """Where the trial's files for TensorBoard are, if some are stored.

        Raises:
            StorageError: the storage failed.
        """
        # Not asked of the storage for a trial that writes none.
        if self._store.is_process_local or not (self._run_dir / TENSORBOARD).exists():
            return None
        folder = layout.run_file_key(self._trial, TENSORBOARD)
        is_there = bool(self._store.storage.sizes(folder))
        return tensorboard_url(self._store, self._trial) if is_there else None

    def store_changed(self) -> None:
        """Store what has changed enough to be worth it. One thread at a time.

        Raises:
            StorageError: the storage failed. The next call tries again.
            OSError: a log cannot be copied.
        """
        self._store_all(self._is_worth_it, self._stop)

    def hurry(self) -> None:
        """Have `store_changed` end soon, since the run has ended."""
        self._stop.set()

    def store_last(self, is_in_a_hurry: bool) -> None:
        """Store all that is left, the ranks having ended; what takes too long is left out.

        Args:
            is_in_a_hurry: whether the process may be killed in a moment.

        Raises:
            StorageError: the storage failed.
            OSError: a log cannot be copied.
        """
        stop = StopSignal()
        timer = threading.Timer(HURRIED_SECONDS if is_in_a_hurry else LAST_SECONDS, stop.set)
        timer.daemon = True
        timer.start()
        try:
            self._store_all(lambda path, size: True, stop)
        finally:
            timer.cancel()

    def _store_all(self, is_due: Callable[[Path, int], bool], stop: StopSignal) -> None:
        if self._store.is_process_local:
            return
        try:
            for path, key in self._files():
                status = path.stat()
                stamp = (status.st_size, status.st_mtime_ns)
                if not stamp[0] or self._sent.get(path) == stamp or not is_due(path, stamp[0]):
                    continue
                self._send(path, key, stop)
                self._sent[path] = stamp
        except WorkCancelled:
            pass  # what is left stays here

    def _is_worth_it(self, path: Path, size_bytes: int) -> bool:
        sent_bytes = self._sent.get(path, (0, 0))[0]
        return size_bytes <= SMALL_BYTES or size_bytes >= sent_bytes * GROWTH

    def _files(self) -> Iterator[tuple[Path, str]]:
        for name in self._beside:
            if (self._run_dir / name).exists():
                yield self._run_dir / name, name
        for path in sorted(self._logs.glob("*.log")):
            if layout.is_file_path(path.name):
                yield path, f"{self._place}/{path.name}"

    def _send(self, path: Path, name: str, stop: StopSignal) -> None:
        # A copy: it is being written, and what is uploaded must be one state of the file.
        scratch = self._run_dir / "staging"
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch, prefix="logs-") as folder:
            copy = Path(shutil.copyfile(path, Path(folder) / path.name))
            self._store.storage.upload(copy, layout.run_file_key(self._trial, name), stop)


def _place(remembered: Path) -> str:
    """Where a folder of logs goes, below the run's folder in the storage; the same every time."""
    if remembered.exists():
        return remembered.read_text()
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    place = f"logs/{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{host}"
    with contextlib.suppress(OSError):  # a full disk: the next run has another place
        remembered.write_text(place)
    return place
