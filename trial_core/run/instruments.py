"""A rank's TensorBoard writer and profiler, and the folder that both write to.

Neither torch nor TensorBoard is imported before a trial asks for what needs it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.errors import TrialError, TrialflowError
from trial_core.run.observer import MetricsKind


class Instruments:
    """What a trial measures itself with. Each rank has its own, with a folder of its own.

    Args:
        folder: where event files and traces go; None: a temporary folder, made when asked for.

    Attributes:
        rank: this process's; the context sets it.
        automatic: whether what is written is uploaded with the run, and reported metrics are
            written as well.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.rank = 0
        self.automatic = True
        self._folder = folder
        self._folder_was_asked_for = False
        self._logs_metrics = False
        self._writer: Any = None
        self._profiler: Any = None
        self._is_profiling = False

    @property
    def has_files_to_upload(self) -> bool:
        """Whether the trial writes files that are to be uploaded with the run."""
        return self.automatic and self._folder_was_asked_for

    def folder(self) -> Path:
        """Where this rank's event files and traces go; exists."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trialflow-tensorboard-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder_was_asked_for = True
        return self._folder

    def move_to(self, folder: Path) -> None:
        """Have `folder` in place of the folder so far, with what has been written there.

        A link takes the old one's place: the trial may know it, and its writer and profiler do.

        Raises:
            TrialflowError: the files cannot be moved.
        """
        old, self._folder = self._folder, folder
        if old is None or old == folder or not self._folder_was_asked_for:
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
                f"cannot move the files for TensorBoard from {old} to {folder}, where the trial "
                f"that is continued has its own: {error}"
            ) from error

    def writer(self) -> Any:
        """This rank's one `torch.utils.tensorboard.SummaryWriter`.

        Raises:
            TrialError: TensorBoard is not installed.
        """
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise TrialError(
                    "get_tensorboard_writer needs TensorBoard, which is not installed "
                    f"({error}): pip install 'trialflow[tensorboard]'"
                ) from error
            self._writer = SummaryWriter(str(self.folder()))
            self._logs_metrics = True
        return self._writer

    def set_automatic(self, automatic: bool) -> None:
        """Switch uploading, and writing of reported metrics, on or off.

        Raises:
            TrialError: it is to be on, and TensorBoard is not installed.
        """
        self.automatic = self._logs_metrics = automatic
        if automatic and self.rank == 0:
            self.writer()

    def report(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        """Write the reported metrics that are numbers; rank 0 alone, if the trial wants that."""
        if self.automatic and self._logs_metrics and self.rank == 0:
            for name, value in metrics.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self.writer().add_scalar(f"{kind}/{name}", value, batches)
        self.flush()

    def flush(self) -> None:
        """Put what was written so far into the event file. Any thread may call this."""
        if self._writer is not None:
            self._writer.flush()

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with `torch.profiler.profile`, made of these arguments.

        Raises:
            TrialError: a profiler is running already.
        """
        import torch

        if self._is_profiling:
            raise TrialError(
                "set_profiler was called while a profiler was running; call it once, in the "
                "trial's __init__"
            )
        # Never the caller's on_trace_ready: the trace belongs where the run's files are.
        kwargs["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(
            str(self.folder()), worker_name=f"rank-{self.rank}"
        )
        self._profiler = torch.profiler.profile(*args, **kwargs)

    def start(self) -> None:
        """Training is about to begin, or goes on."""
        if self._profiler is not None and not self._is_profiling:
            self._profiler.start()
            self._is_profiling = True

    def batch_ended(self) -> None:
        """One more batch is trained."""
        if self._is_profiling:
            self._profiler.step()

    def finish(self) -> None:
        """Training is over: write what is left. May be called again."""
        if self._is_profiling:
            self._is_profiling = False
            self._profiler.stop()
            self._profiler = None
        if self._writer is not None:
            self._writer.close()
