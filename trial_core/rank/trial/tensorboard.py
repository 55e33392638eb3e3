"""A rank's files for TensorBoard: metrics, and traces of the profiler.

torch and TensorBoard are imported on first use.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trial_core.errors import TrialError, TrialflowError
from trial_core.messages import MetricsKind

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""How long the metrics of short workloads may stay out of the event file."""


class TensorBoard:
    """The TensorBoard writer and the profiler of one rank, and the folder that both write to.

    Without `folder` it is a temporary one, created on first use.

    Attributes:
        rank: this process's rank; the context sets it.
        automatic: True if the files are uploaded with the run, and reported metrics are written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.rank = 0
        self.automatic = True
        self._folder = folder
        self._uses_folder = False
        self._logs_metrics = False
        self._has_failed = False
        self._writer: Any = None
        self._profiler: Any = None
        self._is_profiling = False
        self._next_flush = 0.0
        self._batches_to_profile: tuple[int, int, Callable[[], int]] | None = None

    @property
    def has_files_to_upload(self) -> bool:
        """True if the trial writes files to upload with the run."""
        return self.automatic and self._uses_folder

    def folder(self) -> Path:
        """The folder of this rank's event files and traces; creates it."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trialflow-tensorboard-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._uses_folder = True
        return self._folder

    def move_to(self, folder: Path) -> None:
        """Use `folder` from now on, and move the files there.

        A link replaces the old folder: the writer, the profiler and the trial use its path. Raises
        TrialflowError if the files cannot be moved.
        """
        old, self._folder = self._folder, folder
        if old is None or old == folder or not self._uses_folder:
            return
        self.flush()
        try:
            for path in sorted(old.rglob("*")):
                if path.is_dir():
                    continue
                place = folder / path.relative_to(old)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, place)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(old)
            old.symlink_to(folder.resolve())
        except OSError as error:
            raise TrialflowError(
                f"cannot move the TensorBoard files from {old} to {folder}, the folder of the "
                f"resumed trial: {error}"
            ) from error

    def writer(self) -> Any:
        """See `TrialContext.get_tensorboard_writer`."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise TrialError(
                    "get_tensorboard_writer needs TensorBoard, but it is not installed "
                    f"({error}): pip install 'trialflow[tensorboard]'"
                ) from error
            self._writer = SummaryWriter(str(self.folder()))
            events = self._writer.file_writer
            events.event_writer = _EventFile(events.event_writer, self._failure_is_a_warning)
            self._logs_metrics = True
        return self._writer

    def set_automatic(self, automatic: bool) -> None:
        """See `TrialContext.set_enable_tensorboard_logging`."""
        self.automatic = self._logs_metrics = automatic
        if automatic and self.rank == 0:
            self.writer()

    def log_metrics_by_default(self) -> None:
        """Write reported metrics from now on, if TensorBoard is installed; see `report`."""
        self._logs_metrics = self._logs_metrics or find_spec("tensorboard") is not None

    def report(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        """Write the reported metrics that are numbers, on rank 0, under Determined's tags.

        Files that cannot be written, as on a full disk, are a warning, once; training continues.
        """
        if self.automatic and self._logs_metrics and self.rank == 0 and not self._has_failed:
            numbers = {
                name: value
                for name, value in metrics.items()
                if isinstance(value, (int, float)) and not isinstance(value, bool)
            }
            with self._failure_is_a_warning():
                if numbers and self._has_metrics_writer():
                    for name, value in numbers.items():
                        is_validation = kind == "validation" and not name.startswith("val")
                        tag = f"Determined/{'val_' if is_validation else ''}{name}"
                        self.writer().add_scalar(tag, value, batches)
        # Waits for the writer's thread, and so do all ranks. An upload of the files flushes them.
        if kind == "validation" or time.monotonic() >= self._next_flush:
            self._next_flush = time.monotonic() + FLUSH_SECONDS
            self.flush()

    def _has_metrics_writer(self) -> bool:
        """Make the writer. It has been made before, unless metrics are only written by default."""
        try:
            self.writer()
        except TrialError as error:
            self._logs_metrics = False
            logger.warning(
                "reported metrics are not written for TensorBoard, because it cannot be imported: "
                "%s", error.__cause__,
            )  # fmt: skip
        return self._logs_metrics

    def flush(self) -> None:
        """Flush the event files; see `report` for a failure. Any thread may call this."""
        if self._writer is not None and not self._has_failed:
            with self._failure_is_a_warning():
                self._writer.flush()

    @contextmanager
    def _failure_is_a_warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._has_failed:
                return
            self._has_failed = True
            logger.warning(
                "files for TensorBoard cannot be written: %s. Training continues; neither reported "
                "metrics nor what the trial writes are in them from now on", error,
            )  # fmt: skip

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """See `TrialContext.set_profiler`."""
        import torch

        if self._is_profiling:
            raise TrialError(
                "set_profiler was called while a profiler was running; call it once, in the "
                "trial's __init__"
            )
        # Replace the caller's on_trace_ready: the traces must be in the run's folder.
        kwargs["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(
            str(self.folder()), worker_name=f"rank-{self.rank}"
        )
        self._profiler = torch.profiler.profile(*args, **kwargs)

    def profile_batches(self, first: int, last: int, batches_trained: Callable[[], int]) -> None:
        """Profile batches `first` to `last`, counted by `batches_trained`, on rank 0 with
        `torch.profiler`, unless the trial sets a profiler."""
        if self.rank == 0 and self._profiler is None:
            self._batches_to_profile = (first, last, batches_trained)

    def start(self) -> None:
        """Start the profiler, before training begins or continues."""
        if self._batches_to_profile is not None and self._profiler is None:
            # Now, because a profiler asks its schedule about the next batch when it is made.
            self.set_profiler(schedule=_schedule(*self._batches_to_profile))
            self._batches_to_profile = None
        if self._profiler is not None and not self._is_profiling:
            self._profiler.start()
            self._is_profiling = True

    def batch_ended(self) -> None:
        if self._is_profiling:
            self._profiler.step()

    def finish(self) -> None:
        """Write the remaining files at the end of training. A second call does nothing."""
        if self._is_profiling:
            self._is_profiling = False
            self._profiler.stop()
            self._profiler = None
        if self._writer is not None:
            with self._failure_is_a_warning():
                self._writer.close()


class _EventFile:
    """TensorBoard's file of events, whose failures `guard` takes: also those of the trial's own
    calls of the writer."""

    def __init__(self, file: Any, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._file = file
        self._guard = guard
        self.get_logdir = file.get_logdir

    def add_event(self, event: Any) -> None:
        with self._guard():
            self._file.add_event(event)

    def flush(self) -> None:
        with self._guard():
            self._file.flush()

    def close(self) -> None:
        with self._guard():
            self._file.close()


def _schedule(first: int, last: int, batches_trained: Callable[[], int]) -> Callable[[int], Any]:
    """A profiler's schedule. Its own count of steps begins with the run's."""
    from torch.profiler import ProfilerAction

    def action(step: int) -> ProfilerAction:
        batch = batches_trained()
        if batch == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= batch < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if batch == first - 1 else ProfilerAction.NONE

    return action
