"""The loop of a script's run, in place of `Loop`.

For a trial, the sequencer decides the ranks' next work. A script decides itself, and tells the
driver, so this loop follows no schedule::

    fetch the resume point
    until the script has ended:
        run the script until it stores a checkpoint, or calls `Trainer.fit`
        upload and commit the checkpoint                 the script waits for that, or runs on
        or follow the schedule of the fit                as for a trial; then `fit` returns

Slots, restarts, stops, checkpoints and the report work as in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.config.lengths import OPEN_END
from trial_core.driver.fetch_resume_point import fetch, fetch_first_intact
from trial_core.driver.loop import Loop, result_of, wind_up
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import attach_trial, tell_changes
from trial_core.driver.stages.script import RunningScript, ScriptReports, UploadEnded, run_script
from trial_core.driver.uploads import Uploads
from trial_core.errors import CheckpointRefused, ConfigError
from trial_core.messages import (
    Done,
    EndFit,
    FitBegun,
    Length,
    ReleaseStaging,
    RestoredSettings,
    RunScript,
    SettingsRestored,
)
from trial_core.schedule.sequencer import Schedule
from trial_core.schedule.units import Batch, Epoch, TrainUnit


def follow_script(launch: Launch, uploads: Uploads) -> TrialResult:
    """Run the script of a trial on its ranks, to its end.

    Raises:
        RankFailed: the script raised, or exited with another code than 0.
        CheckpointError: a checkpoint of the script could not be stored. `CheckpointRefused` is
            the script's own error, unless the script has ended.
        ConfigError: neither the experiment nor the script's `fit` says how long to train.
    """
    run, metrics = launch.run, launch.answers.metrics
    uploads.own.check()
    # The script decides whether ranks can restore it, or it is known when its trial is attached.
    start = fetch_first_intact(
        run.resume_points(), lambda point: fetch(launch, point), run.observer.notice
    )
    if start.checkpoint is not None:
        run.logger.info("the script starts from checkpoint %s", start.uuid)
    metrics.clear()  # earlier ranks' steps were lost
    metrics.update(start.metrics)
    searcher, begin = run.config.searcher, start.progress.batches_trained
    progress = ScriptReports(run.metric, searcher.smaller_is_better, start.progress, metrics)
    launch.status.batches_trained = launch.status.began_at = begin
    run.clock.starts_at(begin)
    launch.status.end = _length(run)
    run.observer.run_started(run.trial, launch.status.end, begin, 0)
    tell_changes(launch, start, RestoredSettings())  # the script restores what it stored itself
    launch.may_save()
    best = start.progress.best_metric
    pause = run.pause_at
    ask = RunScript(
        checkpoint=start.uuid, batches_trained=begin, best_metric=best,
        pause_at=_plain(pause),
    )  # fmt: skip
    script = RunningScript(launch, ask)
    fitted: TrialResult | None = None
    stored = _Newest(launch, start.uuid if start.restore == "everything" else None)
    launch.status.saved_at = begin if stored.uuid else None
    while not isinstance(
        event := run_script(launch, script, progress, launch.status.batches_trained), list
    ):
        if isinstance(event, FitBegun):
            fitted = follow_fit(launch, uploads, event, start if fitted is None else None)
            progress.progress = progress.progress.after_training(fitted.batches_trained)
            continue
        if isinstance(event, UploadEnded):
            stored.settle(uploads.poll)
            continue
        if isinstance(event, SettingsRestored):
            tell_changes(launch, start, event.settings)
            continue
        launch.status.batches_trained = event.steps_completed
        launch.status.has_trained = True
        if launch.withholds_checkpoint(event.steps_completed, is_last=False):
            launch.ask(ReleaseStaging(uuid=event.uuid), Done)  # and the script continues
            continue
        at = progress.stored(event.steps_completed)
        folders = _folders(launch, event.uuid)
        stored.settle(uploads.finish)  # the one before this: the script has waited for it
        stored.begin(event.uuid)
        uploads.start(StagedCheckpoint.now(event.uuid, at, progress.metrics, folders))
        if not event.waits:
            uploads.call_at_end(lambda: launch.script_events.put(UploadEnded()))
        elif not stored.settle(uploads.finish):
            continue
        launch.has_saved(event.steps_completed)
    uploads.finish()
    if run.keep and fitted is None:
        names = ", ".join(run.keep)
        launch.warn([f"keep has no effect ({names}): the script restores its state itself"])
    run.throughput.note_memory([rank.peak_memory_bytes for rank in event])
    launch.answers.writes_run_files = any(rank.writes_run_files for rank in event)
    reached, end = launch.status.batches_trained, _length(run)
    waits = pause is not None and run.stopping.request is None and not (end and reached >= end)
    if isinstance(pause, Batch) and isinstance(pause.value, int):  # else it has ended by itself
        waits = waits and (progress.progress.validated_at or 0) >= pause.value
    was_preempted = any(rank.was_preempted for rank in event)
    stopped_early = was_preempted or waits
    if fitted is not None:
        stopped_early = was_preempted or fitted.stopped_early
        waits = fitted.stop_reason is not None
    pause = pause if waits else None
    wind_up(launch, uploads, reached, stopped_early, None, pause)
    if fitted is not None:
        return replace(fitted, stopped_early=stopped_early)
    return result_of(launch, reached, progress.progress, stored.uuid, stopped_early, pause)


class _Newest:
    """A script's newest checkpoint, or None: the one in upload, unless that is refused."""

    def __init__(self, launch: Launch, uuid: str | None) -> None:
        self._launch = launch
        self.uuid = uuid
        self._before = uuid, launch.status.saved_at

    def begin(self, uuid: str) -> None:
        self._before = self.uuid, self._launch.status.saved_at
        self.uuid = uuid

    def settle(self, finish: Callable[[], None]) -> bool:
        """Finish the upload. False if it is refused: the script gets the error, and may go on.

        Raises CheckpointError if the upload failed for another reason.
        """
        try:
            finish()
        except CheckpointRefused as refused:
            uuid, (self.uuid, self._launch.status.saved_at) = str(self.uuid), self._before
            self._launch.run.logger.warning("checkpoint %s is not committed: %s", uuid, refused)
            self._launch.ask(ReleaseStaging(uuid=uuid, refusal=str(refused)), Done)
            return False
        return True


def follow_fit(
    launch: Launch, uploads: Uploads, fit: FitBegun, start: ResumePoint | None
) -> TrialResult:
    """Train as a script's `Trainer.fit` asks, and let it return.

    It starts at `start` if its files are fetched already; else the run chooses.
    """
    answers = launch.answers
    answers.stop_requested, answers.stop_reason = False, None  # from an earlier fit
    answers.keep = [*launch.run.keep, *fit.keep]
    attach_trial(launch)
    if launch.should_stop:
        launch.slots.stop()  # again: the attached trial starts without it
    schedule = _schedule(launch.run, fit)
    result = Loop(launch, uploads, schedule, start).run()
    result = replace(
        result, run_dir=str(launch.run.run_dir), trial_stop_reason=answers.stop_reason,
        throughput=launch.run.throughput.throughput.to_json(),
    )  # fmt: skip
    launch.ask(EndFit(result=asdict(result)), Done)
    return result


def _schedule(run: Run, fit: FitBegun) -> Schedule:
    """Return the schedule of a fit: from its arguments, and from the experiment."""
    config = run.config
    named = config.searcher.max_length if config.searcher.max_length != OPEN_END else None
    given = _unit(fit.max_length)
    max_length = named or given
    if max_length is None:
        raise ConfigError(
            "fit needs max_length: Batch(1000) or Epoch(3), for example; or give the experiment "
            "searcher.max_length"
        )
    if named is not None and given is not None and named != given:
        run.logger.info("training ends at searcher.max_length, %r, not at fit's %r", named, given)
    own = config.schedule()
    policy = fit.checkpoint_policy or config.checkpoint_policy
    return replace(
        own,
        max_length=max_length,
        reporting_period=own.reporting_period or _unit(fit.reporting_period),
        validation_period=_unit(fit.validation_period) or own.validation_period,
        checkpoint_period=_unit(fit.checkpoint_period) or own.checkpoint_period,
        checkpoint_policy="all" if policy == "best" and run.metric is None else policy,
        step_zero_validation=fit.step_zero_validation or own.step_zero_validation,
    )


def _unit(length: Length | None) -> TrainUnit | None:
    if length is None:
        return None
    return (Batch if length.unit == "batches" else Epoch)(length.value)


def _plain(pause: TrainUnit | None) -> Length | None:
    if pause is None or not isinstance(pause.value, int):
        return None
    return Length(unit="batches" if isinstance(pause, Batch) else "epochs", value=pause.value)


def _length(run: Run) -> int:
    """Return the number of steps that the experiment announces; 0 if it announces none."""
    length = run.config.searcher.max_length
    if length == OPEN_END or not isinstance(length, Batch):
        return 0
    return length.value if isinstance(length.value, int) else 0


def _folders(launch: Launch, uuid: str) -> tuple[str, ...]:
    """Make each rank's staging folder, if the driver uploads. A rank may have written nothing."""
    if not launch.run.store.is_process_local:
        return ()
    ranks = range(launch.slots.world_size)
    folders = [launch.run.run_dir / "staging" / uuid / f"rank-{rank}" for rank in ranks]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return tuple(map(str, folders))
