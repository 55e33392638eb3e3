"""`trialflow train --json`: how a run ended, as the last line of stdout, whatever the end."""

from __future__ import annotations

import sys
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from trial_core import text_format
from trial_core.errors import CheckpointError, Stopped, TrialflowError
from trial_core.run.run_status import RunStatus
from trialflow.deployments.cli import console

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trialflow.flows.train import TrialResult

Status = Literal["completed", "stopped", "failed", "refused"]


class JsonResult:
    """How a run ended. A context manager around it, at whose end the line is printed.

    The line is an object with the fields of `trialflow.flows.train.TrialResult`, as far as they are known
    (null: not), and

    - ``status``: ``completed`` (at its end, or where the trial asked to stop), ``stopped`` (by
      whom else, ``stop_reason`` says), ``failed`` (exit codes 1 and 70) or ``refused`` (2);
    - ``error_type``, ``error``: what went wrong, as a class name and a line; null if nothing did.

    Metrics that JSON has no number for (NaN, infinities) are null. A run that is ended at once, by
    a second signal, has no time to say anything.

    Attributes:
        status: how it ended.
        result: what the flow returned, if it did.
        trial, flow_run_id: as soon as they are known.
        stop_reason: who asked it to stop.
        progress: what the run has told.
        store: where its checkpoints are.
        stream: where people are told of it.
    """

    def __init__(self, is_printed: bool) -> None:
        self.status: Status = "failed"
        self.result: TrialResult | None = None
        self.trial: str | None = None
        self.flow_run_id: str | None = None
        self.stop_reason: str | None = None
        self.progress: RunStatus | None = None
        self.store: CheckpointStore | None = None
        # Where people are told; a program that reads stdout reads one line there.
        self.stream = sys.stderr if is_printed else sys.stdout
        self._is_printed = is_printed
        self._error: tuple[str, str] | None = None

    def __enter__(self) -> JsonResult:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, TrialflowError):
            self.failed(error, console.exit_code(error))
        elif isinstance(error, KeyboardInterrupt):
            self.stopped("Ctrl-C")
        elif error is not None:
            self._error = (type(error).__name__, text_format.one_line(str(error)))
        if self._is_printed:
            print(self.line(), flush=True)

    def completed(self, result: TrialResult) -> None:
        """The flow has returned."""
        self.result = result
        self.status = "stopped" if result.stop_reason else "completed"

    def stopped(self, who: str) -> None:
        """A signal has ended it."""
        self.status, self.stop_reason = "stopped", f"interrupted ({who})"

    def failed(self, failure: TrialflowError, exit_code: int) -> None:
        """It was refused or has failed; or it was stopped, if that is what the failure says."""
        self.status = "refused" if exit_code == console.REFUSED else "failed"
        if isinstance(failure, Stopped):
            self.status, self.stop_reason = "stopped", str(failure)
        self._error = (type(failure).__name__, text_format.one_line(str(failure)))

    def line(self) -> str:
        """All that is known, as one line of JSON."""
        import msgspec

        error_type, error = self._error or (None, None)
        known = self._as_returned() if self.result is None else asdict(self.result)
        said = {"status": self.status, **known, "error_type": error_type, "error": error}
        return msgspec.json.encode(said).decode()

    def _as_returned(self) -> dict[str, Any]:
        """The fields of a result that the flow could not return."""
        from trial_core.run.run_dirs import home_folder

        progress = self.progress or RunStatus()
        run_dir = home_folder() / self.trial if self.trial else None
        report = run_dir / "report.md" if run_dir else None
        uuid = self._newest_checkpoint()
        return {
            "trial": self.trial,
            "batches_trained": progress.batches,
            "stopped_early": self.status == "stopped",
            "stop_reason": self.stop_reason,
            "training_metrics": dict(progress.training),
            "validation_metrics": dict(progress.validation),
            "checkpoint_uuid": uuid,
            "checkpoint_url": self.store.files_url(uuid) if self.store and uuid else None,
            "tensorboard_url": None,
            "report_path": str(report) if report and report.exists() else None,
            "run_dir": str(run_dir) if run_dir and run_dir.exists() else None,
            "flow_run_id": self.flow_run_id,
        }

    def _newest_checkpoint(self) -> str | None:
        """The uuid of what the trial would go on from."""
        if self.store is None or self.trial is None:
            return None
        try:
            newest = self.store.newest(self.trial)
        except CheckpointError:
            return None  # the storage may be what has failed
        return newest.uuid if newest else None
