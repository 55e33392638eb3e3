"""The JSON line that `trialflow train --json` prints last to stdout, however the run ended."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from trial_core.common import text_format
from trial_core.errors import CheckpointError, Stopped, TrialflowError
from trial_core.observe.events.run_status import RunStatus
from trialflow.deployments.cli import console
from trialflow.deployments.cli.json_output import json_document, json_text

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trialflow.flows.train import TrialResult

JsonStatus = Literal["completed", "stopped", "failed", "refused"]


class JsonResult:
    """Records how a run ended. As a context manager, prints the line at the end of the block.

    The line is an object with the fields of `TrialResult` (null: unknown), and

    - ``status``: ``completed`` (trained to its end, or the trial itself stopped it), ``stopped``
      (``stop_reason`` names the stop request), ``failed`` (exit codes 1, 70), ``refused`` (2);
    - ``error_type``, ``error``: the error's class name and first line, or null.

    Metrics without a JSON number (NaN, infinities) are null. A second signal ends the process at
    once and prints nothing.

    Attributes:
        result: the flow's result, if it returned one.
        trial, flow_run_id: known once the flow runs.
        stream: for text that people read: stderr if the line is printed, else stdout.
    """

    def __init__(self, is_printed: bool) -> None:
        self.status: JsonStatus = "failed"
        self.result: TrialResult | None = None
        self.trial: str | None = None
        self.flow_run_id: str | None = None
        self.stop_reason: str | None = None
        self.run_status = RunStatus()
        self.store: CheckpointStore | None = None
        self.stream = sys.stderr if is_printed else sys.stdout
        self._is_printed = is_printed
        self._error: tuple[str, str] | None = None

    def __enter__(self) -> JsonResult:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TrialflowError):
            self.failed(error, console.exit_code(error))
        elif isinstance(error, KeyboardInterrupt):
            self.stopped("Ctrl-C")
        elif error is not None:
            self._error = (type(error).__name__, text_format.one_line(str(error)))
        if self._is_printed:
            print(self.line(), flush=True)

    def completed(self, result: TrialResult) -> None:
        self.result = result
        self.status = "stopped" if result.stop_reason else "completed"

    def stopped(self, signal_name: str) -> None:
        self.status, self.stop_reason = "stopped", f"interrupted ({signal_name})"

    def failed(self, failure: TrialflowError, exit_code: int) -> None:
        """Record an error: the run was refused, failed, or (`Stopped`) was stopped."""
        self.status = "refused" if exit_code == console.REFUSED else "failed"
        if isinstance(failure, Stopped):
            self.status, self.stop_reason = "stopped", str(failure)
        self._error = (type(failure).__name__, text_format.one_line(str(failure)))

    def line(self) -> str:
        """Everything known, as one line of JSON."""
        error_type, error = self._error or (None, None)
        fields = asdict(self.result or self._known_result())
        del fields["config"]
        line = {"status": self.status, **fields, "error_type": error_type, "error": error}
        return json_text(json_document("train", line))

    def _known_result(self) -> TrialResult:
        """What is known of the result of a flow that did not return it."""
        from trial_core.driver.result import TrialResult
        from trial_core.observe.ledger.stored_ledger import read_ledger
        from trial_core.processes.machine.run_dirs import run_dir_of

        run_dir = run_dir_of(self.trial) if self.trial else None
        report = run_dir / "report.md" if run_dir else None
        newest = ledger = None
        if self.store is not None and self.trial is not None:
            with suppress(CheckpointError):  # the storage may be the cause of the failure
                newest = self.store.newest(self.trial)
            with suppress(CheckpointError):
                ledger = read_ledger(self.store, self.trial)
        uuid = newest.uuid if newest else None
        return TrialResult(
            trial=self.trial,  # type: ignore[arg-type]  # unknown before the flow runs
            batches_trained=self.run_status.batches,
            stopped_early=self.status == "stopped",
            stop_reason=self.stop_reason,
            training_metrics=dict(self.run_status.training),
            validation_metrics=dict(self.run_status.validation),
            validated_at=self.run_status.validated_at,
            checkpoint_uuid=uuid,
            checkpoint_at=newest.progress.batches_trained if newest else None,
            checkpoint_url=self.store.files_url(uuid) if self.store and uuid else None,
            report_path=str(report) if report and report.exists() else None,
            run_dir=str(run_dir) if run_dir and run_dir.exists() else None,
            flow_run_id=self.flow_run_id,
            throughput=self.run_status.run_throughput.to_json(),
            ledger=ledger.to_json() if ledger and ledger.runs else None,
        )
