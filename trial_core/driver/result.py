"""How a run ended: its result, and sentences about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trial_core.config import ExperimentConfig
from trial_core.schedule.stop_requests import completed_early
from trial_core.schedule.units import TrainUnit


@dataclass(frozen=True)
class TrialResult:
    """How a run ended. Fields of a flow run are None after `Trainer.fit`.

    Attributes:
        trial: the trial's id; give it to the flow again to continue the trial.
        batches_trained: over all runs of the trial.
        stopped_early: True if the run ended before its maximum length, or its last validation.
        stop_reason: why the flow run was stopped, or where the trial waits to be trained further;
            None if the trial requested the stop.
        training_metrics, validation_metrics: the last ones.
        validated_at: the batch of the last validation; None before the first.
        checkpoint_uuid: the trial's newest committed checkpoint.
        checkpoint_url: the folder of the files that it has stored itself; `fetch` gets all.
        tensorboard_url: the folder of the flow run's TensorBoard files, if the trial writes any.
        report_path: the flow run's report, as a Markdown file.
        run_dir: the flow run's folder on this machine, with its logs.
        flow_run_id: Prefect's id of the flow run.
        ledger: the trial's ledger of time until then, as `trialflow runs show --json` prints it.
        trial_stop_reason: why the trial requested a stop, if it says so.
        checkpoint_at: how many batches were trained when the checkpoint was saved.
        throughput: the run's average over its train-workloads: batches_per_second,
            samples_per_second, tokens_per_second, mfu; and peak_memory_bytes, by rank. None if
            unknown.
        changes: what had changed since the checkpoint that the run resumed, and which values count,
            as sentences.
        config: the flow run's experiment, with which later flows and tasks find the checkpoint.
    """

    trial: str
    batches_trained: int
    stopped_early: bool
    stop_reason: str | None = None
    training_metrics: dict[str, Any] = field(default_factory=dict)
    validation_metrics: dict[str, Any] = field(default_factory=dict)
    validated_at: int | None = None
    checkpoint_uuid: str | None = None
    checkpoint_url: str | None = None
    tensorboard_url: str | None = None
    report_path: str | None = None
    run_dir: str | None = None
    flow_run_id: str | None = None
    ledger: dict[str, Any] | None = None
    trial_stop_reason: str | None = None
    checkpoint_at: int | None = None
    throughput: dict[str, Any] | None = None
    changes: list[str] = field(default_factory=list)
    config: ExperimentConfig | None = field(default=None, repr=False)


def describe_saved(result: TrialResult) -> str:
    """Describe the checkpoint of a stopped run, for people."""
    if result.checkpoint_uuid is None:
        return "nothing to save: no batch was trained"
    return f"saved at batch {result.checkpoint_at}, checkpoint {result.checkpoint_uuid}"


def describe_pause(pause: TrainUnit | None) -> str | None:
    """Say that a trial waits to be trained further, for people; None if it does not wait."""
    return None if pause is None else f"it waits at {pause.value} {pause.unit}"


def status_of(result: TrialResult) -> str:
    """Return the status of a run that has a result, for people."""
    if not result.stopped_early:
        return "completed"
    return f"{how_early(result)}; {describe_saved(result)}"


def how_early(result: TrialResult) -> str:
    """How a run has ended that has ended before its maximum length, for people."""
    why = result.stop_reason
    return completed_early(result.trial_stop_reason) if why is None else f"stopped: {why}"
