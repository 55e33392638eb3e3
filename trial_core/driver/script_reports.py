"""The progress of a Core API script, from its reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_core.errors import TrialError
from trial_core.messages import MetricsKind
from trial_core.schedule.sequencer import Progress, searcher_metric


@dataclass
class ScriptReports:
    """The progress and the last metrics of a Core API script.

    Attributes:
        metric: the name of the searcher metric, or None.
        smaller_is_better: True if a smaller value of it is better.
        progress: the progress so far; a step is a batch.
        metrics: the last metrics of each kind.
        has_warned: True after the warning that the script does not report the searcher metric.
    """

    metric: str | None
    smaller_is_better: bool
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_warned: bool = False

    def reported(
        self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]
    ) -> TrialError | None:
        """Note a report. Return the error if a validation lacks the searcher metric."""
        self.progress = self.progress.after_training(steps_completed)
        self.metrics[kind] = dict(metrics)
        if kind == "training":
            return None
        value = mistake = None
        if self.metric is not None:
            try:
                value = searcher_metric(metrics, self.metric)
            except TrialError as error:
                mistake = error
        self.progress = self.progress.after_validation(value, self.smaller_is_better)
        return mistake

    def stored(self, steps_completed: int) -> Progress:
        """Note a checkpoint. Return the progress there."""
        self.progress = self.progress.after_training(steps_completed).after_checkpoint()
        return self.progress
