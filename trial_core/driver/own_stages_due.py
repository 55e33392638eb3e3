"""The stages of the user's own: when each is due, and how its result or failure is handled.

A stage runs in its own process, in parallel with training, or training waits for it. A stage that
is due again while it runs is called afterwards, for the newest occasion. The end of training waits
for all of them; a stop kills them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.common.text_format import clean, is_number, one_line
from trial_core.config.sections import After, StageConfig
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import OwnStageFailed, Running
from trial_core.driver.stages.own_stage import call, own_stage
from trial_core.errors import ConfigError, TrialError
from trial_core.processes.machine.background import in_background
from trial_core.schedule.units import EpochLength


class OwnStages:
    """The own stages of one launch; `mistake` is the failure of one that ends the run, or None."""

    def __init__(self, launch: Launch) -> None:
        run = launch.run
        self._launch = launch
        self._own = [] if run.test_mode else list(enumerate(run.config.stages))
        self._last: dict[int, int] = {}
        self._running: dict[int, Running[Any]] = {}
        self._waiting: dict[int, dict[str, Any]] = {}
        self._checks = [
            (number, in_background(partial(call, launch, stage, None), "check-stage"))
            for number, stage in self._own
        ]
        self.mistake: TrialError | None = None

    def check(self) -> None:
        """Wait for the import of each function, which began with the launch. Raises ConfigError."""
        while self._checks:
            number, imported = self._checks.pop()
            try:
                imported.result()
            except OwnStageFailed as failure:
                if self._launch.run.stopping.request is None:
                    raise ConfigError(
                        f"stages[{number}].run: it cannot be imported: {failure}"
                    ) from failure

    def check_periods(self, epoch: EpochLength | None) -> None:
        """Check that periods in epochs have a loader with a length. Raises ConfigError."""
        for _, stage in self._own:
            if stage.every is not None:
                stage.every.times_due(0, epoch)

    @property
    def metric_names(self) -> list[str]:
        """The validation metrics that blocking stages declare."""
        return [
            name
            for _, stage in self._own
            if stage.gives_validation_metrics
            for name in stage.metrics
        ]

    def run_blocking(self, after: After, batches: int, checkpoint: Manifest | None = None) -> None:
        """Run the due stages that training waits for; after a validation, add their metrics."""
        for _, stage in self._due(after, batches, blocking=True):
            try:
                argument = self._argument(stage, batches, checkpoint)
                returned = own_stage(self._launch, stage, argument).result()
            except OwnStageFailed as failure:
                self._failed(stage, failure)
            else:
                self._take(stage, returned)

    def start_beside(self, after: After, batches: int, checkpoint: Manifest | None = None) -> None:
        """Start the due stages that run in parallel, each once its earlier call has ended."""
        for number, stage in self._due(after, batches, blocking=False):
            if (left_out := self._waiting.get(number)) is not None:
                at = left_out["batches_trained"]
                self._launch.warn(
                    [f"stage {stage.run} is left out at batch {at}: an earlier call still runs"]
                )
            self._waiting[number] = self._argument(stage, batches, checkpoint)
        self.poll()

    def poll(self) -> None:
        """Take the results of ended stages, and start the calls that waited for them."""
        for number, stage in self._own:
            if number in self._running and self._running[number].ended.is_set():
                try:
                    returned = self._running.pop(number).pending.result()
                except OwnStageFailed as failure:
                    self._failed(stage, failure)
                else:
                    self._take(stage, returned)
            if self._launch.run.stopping.request is not None:
                self._waiting.clear()
            if number in self._waiting and number not in self._running:
                argument = self._waiting.pop(number)
                started = own_stage(self._launch, stage, argument)
                self._running[number] = Running(started)

    def finish(self) -> None:
        """Wait for all running and waiting stages, and take their results."""
        while self._running:
            self.wait()
            self.poll()

    @property
    def is_busy(self) -> bool:
        """True while a stage runs in parallel, which may read a checkpoint."""
        return any(not each.ended.is_set() for each in self._running.values())

    def wait(self) -> None:
        """Wait for running stages. A stop request, or a failure of the launch, ends them."""
        for each in self._running.values():
            each.ended.wait()

    def _due(self, after: After, batches: int, *, blocking: bool) -> list[tuple[int, StageConfig]]:
        found = []
        for number, stage in self._own:
            if stage.after != after or (stage.blocking or after == "training") != blocking:
                continue
            epoch, every = self._launch.answers.epoch, stage.every
            last = self._last.get(number, self._launch.status.began_at)
            if after == "training":  # a script may have ended its fit already
                is_due = self._last.get(number) != batches
            else:
                before = 0 if every is None else every.times_due(last, epoch)
                is_due = every is None or every.times_due(batches, epoch) > before
            if is_due:
                self._last[number] = batches
                found.append((number, stage))
        return found

    def _argument(
        self, stage: StageConfig, batches: int, checkpoint: Manifest | None
    ) -> dict[str, Any]:
        """Return the function's argument; `docs/guides/stages.md` lists its keys."""
        run, metrics = self._launch.run, self._launch.answers.metrics
        validated = metrics.get("validation", {})
        if stage.after == "validate":
            validated = self._launch.answers.validated
        return {
            "trial": run.trial,
            "after": stage.after,
            "batches_trained": batches,
            "training_metrics": metrics.get("training", {}),
            "validation_metrics": validated,
            "checkpoint": None if checkpoint is None else {
                "uuid": checkpoint.uuid,
                "url": run.store.files_url(checkpoint.uuid),
                "batches_trained": checkpoint.progress.batches_trained,
            },
            "run_dir": str(run.run_dir),
            "config": run.config.model_dump(mode="json"),
        }  # fmt: skip

    def _failed(self, stage: StageConfig, failure: OwnStageFailed) -> None:
        run = self._launch.run
        if run.stopping.request is not None:
            run.logger.info("%s", failure)
        elif stage.on_failure == "fail" or run.metric in stage.metrics:
            self.mistake = self.mistake or TrialError(str(failure))
        else:
            self._launch.warn([str(failure)])

    def _take(self, stage: StageConfig, returned: Any) -> None:
        """Report the metrics that a stage has returned."""
        given = returned if isinstance(returned, dict) else {}
        problems = []
        if returned is not None and not isinstance(returned, dict):
            problems.append(f"it returned {_shown(returned)}, and no mapping")
        validated = self._launch.answers.validated
        for name in sorted({*given, *stage.metrics}):
            value = given.get(name)
            if name not in given:
                problems.append(f'it did not return the metric "{name}"')
            elif name not in stage.metrics:
                problems.append(f'"{name}" is not among its metrics in the experiment')
            elif not is_number(value) or (isinstance(value, int) and value.bit_length() > 63):
                problems.append(
                    f'the metric "{name}" is no number, or exceeds 64 bits: {_shown(value)}'
                )
            elif stage.gives_validation_metrics and name in validated:
                problems.append(f'the trial reports "{name}" already')
            elif stage.gives_validation_metrics:
                validated[name] = value
            else:
                self._launch.run.logger.info("stage %s: %s %s", stage.run, name, value)
        self._launch.warn([f"stage {stage.run}: {problem}" for problem in problems])


def _shown(value: Any) -> str:
    """Return the beginning of a value, for people."""
    return one_line(clean(repr(value)[:60]))
