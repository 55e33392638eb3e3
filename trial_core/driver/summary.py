"""The lines that end a run's output: on a terminal, and in the log of a script."""

from __future__ import annotations

import shlex
from pathlib import Path

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import best_of_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common import text_format
from trial_core.driver.result import TrialResult
from trial_core.observe.events.throughput import Throughput
from trial_core.observe.trackers.journal import PAGE
from trial_core.processes.machine.run_dirs import run_dir_of

SHOWN_METRICS = 24


def summary_lines(
    headline: str,
    result: TrialResult,
    best: Manifest | None = None,
    *,
    continue_with: str | None = None,
    ui: str | None = None,
    next_step: str | None = None,
) -> list[str]:
    """The headline, and a run's facts.

    Args:
        best: the trial's best checkpoint, which is shown if it is another one than the last.
        continue_with: how to train the trial on, if that is to be said.
        ui: the run's page in Prefect's UI.
        next_step: a command that uses the result.
    """
    throughput, at = Throughput.from_json(result.throughput), result.validated_at
    when = "" if at in (None, result.batches_trained) else f" (validated at batch {at})"
    is_last = best is None or best.uuid == result.checkpoint_uuid
    metrics = [*result.validation_metrics.items()]
    left = len(metrics) - SHOWN_METRICS
    facts = [  # pairs, not a dict: a metric may be called "report"
        *(
            (text_format.clean(name), text_format.one_line(text_format.number(value)) + when)
            for name, value in metrics[:SHOWN_METRICS]
        ),
        ("…", f"{text_format.plural(left, 'more metric')}, in the report" if left > 0 else None),
        ("throughput", throughput.speed or None),
        ("peak memory", throughput.memory or None),
        ("checkpoint", result.checkpoint_url),
        ("best", None if best is None or is_last else _described(best)),
        ("continue with", continue_with),
        ("report", result.report_path),
        ("HTML report", str(page) if (page := run_dir_of(result.trial) / PAGE).exists() else None),
        ("logs", result.run_dir and _logs(Path(result.run_dir))),
        ("UI", ui),
        ("next", next_step),
    ]
    shown = [(name, fact) for name, fact in facts if fact is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return [headline, *(f"  {name:<{width}}  {fact}" for name, fact in shown)]


def best_checkpoint(store: CheckpointStore, trial: str) -> Manifest | None:
    """The trial's best checkpoint; None without one. Raises StorageError."""
    return best_of_trial(store.list(trial))


def next_step(
    result: TrialResult, best: Manifest | None, place: str, is_script: bool
) -> str | None:
    """The command that uses the best checkpoint of a completed run, or else its last.

    None without a checkpoint, and if the run was stopped, which is to be continued. `place` are the
    options that name the storage, after a space; or empty. No export reads the files of a script.
    """
    if result.checkpoint_uuid is None or result.stop_reason is not None:
        return None
    which = f"{'latest' if best is None else 'best'}:{result.trial}"
    does = f"checkpoints download {which} --to checkpoint"
    if not is_script:
        does = f"export {which} --to model.safetensors"
    return f"trialflow {does}{place}"


def storage_option(url: str) -> str:
    """The option that names a storage, for a shell, after a space."""
    return f" --storage {shlex.quote(url)}"


def _described(checkpoint: Manifest) -> str:
    """A checkpoint in one line: its uuid, its batch and its metrics."""
    metrics = text_format.metrics_line(checkpoint.metrics["validation"])
    at = checkpoint.progress.batches_trained
    return f"{checkpoint.uuid[: text_format.SHORT_UUID]}, at batch {at}: {metrics}"


def _logs(run_dir: Path) -> str | None:
    """The folder of the ranks' logs; None if no rank has written anything."""
    folder = run_dir / "logs"
    return str(folder) if any(file.stat().st_size for file in folder.glob("*.log")) else None
