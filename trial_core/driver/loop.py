"""The loop of a run: its ranks train, validate and save in the order that the sequencer decides.

The driver executes it for flows and for scripts. The hooks in their places::

    fetch the resume point
    on_trial_startup
    build the loaders
    on_training_start
    find the names of the validation metrics, if the searcher metric may be missing
    until the sequencer says that the run is finished:
        train           on_training_workload_end; the run ends if its losses stay non-finite
        validate        on_validation_end, then the metrics are reported
        save            on_checkpoint_write_end, on_checkpoint_end
                        (the upload runs in parallel with training; on_checkpoint_upload_end
                        follows it)
    wait for the upload; a checkpoint that a rank has copied wrongly is saved again
    on_trial_shutdown

The whole route of a stop: `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.common.text_format import is_number
from trial_core.driver.fetch_resume_point import fetch, fetch_first_intact, require_convertible
from trial_core.driver.result import TrialResult, describe_pause
from trial_core.driver.run import Launch
from trial_core.driver.stages.build import build_loaders
from trial_core.driver.stages.callbacks import call_hook
from trial_core.driver.stages.checkpoint import checkpoint_save, sweep_leftovers
from trial_core.driver.stages.train_workload import train_workload
from trial_core.driver.stages.upload_run_files import upload_run_files
from trial_core.driver.stages.validate import check_metrics, report_validation, validate
from trial_core.driver.uploads import Uploads
from trial_core.errors import TrialError, WeightsChanged
from trial_core.messages import Done, ReleaseStaging
from trial_core.schedule.sequencer import (
    Checkpoint,
    Finish,
    Progress,
    Schedule,
    Train,
    Validate,
    has_more_to_do,
    is_paused,
    next_workload,
    not_reported,
)
from trial_core.schedule.units import Batch, EpochLength, TrainUnit, in_batches


class Loop:
    """The loop of one launch of a run.

    Args:
        uploads: the launch's work in parallel with training.
        schedule: by default the experiment's.
        fetched: the resume point, if its files are fetched already; by default the run chooses.
    """

    def __init__(
        self,
        launch: Launch,
        uploads: Uploads,
        schedule: Schedule | None = None,
        fetched: ResumePoint | None = None,
    ) -> None:
        self._launch = launch
        self._run = launch.run
        self._uploads = uploads
        self._schedule = replace(
            schedule or launch.run.config.schedule(), pause_at=launch.run.pause_at
        )
        self._fetched = fetched
        self._lacked_metric = False
        self._mistake: TrialError | None = None
        self._staged: StagedCheckpoint | None = None
        self._saved_before: int | None = None

    def run(self) -> TrialResult:
        """Train until the run ends, is stopped, or moves to other nodes.

        Raises TrialError if the trial does not report the searcher metric, its losses stay
        non-finite, or a stage of the user's own has failed. The run saves first, unless the losses
        are not finite.
        """
        launch, uploads, metrics = self._launch, self._uploads, self._launch.answers.metrics
        uploads.own.check()
        start = self._fetch_resume_point()
        metrics.clear()  # earlier ranks' batches were lost
        metrics.update(start.metrics)
        progress = self._progress_at(start)
        begin = progress.batches_trained
        only_compares = self._run.test_mode == "compare"
        if self._run.test_mode and not only_compares:
            end = Batch(begin + 1)
            self._schedule = Schedule(end, reporting_period=end, checkpoint_policy="none")
        call_hook(
            launch, "on_trial_startup", begin, first_batch_idx=begin, checkpoint_uuid=start.uuid
        )
        if only_compares:
            build_loaders(launch, start)
            return self._result(start, progress, stopped_early=True)
        epoch = self._build_loaders(start, progress)
        call_hook(launch, "on_training_start", begin)
        launch.may_save()  # from here on a stop request saves first
        first = next_workload(progress, self._schedule, epoch)
        if isinstance(first, Finish):
            self._run.logger.info(
                "trial %s is already at %d of %d batches; %s",
                self._run.trial, begin, launch.status.end, self._run.how_to_go_on,
            )  # fmt: skip
        elif isinstance(first, Train) and self._lacks_metric():
            progress = progress.stopping()

        progress = self._work(progress, epoch)
        while (lacking := self._stored(uploads.finish, progress)) is not progress:
            progress = self._work(lacking, epoch)
        call_hook(launch, "on_trial_shutdown", progress.batches_trained)
        stopped_early = has_more_to_do(progress, self._schedule, epoch)
        pause = self._schedule.pause_at if is_paused(progress, self._schedule, epoch) else None
        wind_up(launch, uploads, progress.batches_trained, stopped_early, self._mistake, pause)
        return self._result(start, progress, stopped_early, pause)

    def _result(
        self,
        start: ResumePoint,
        progress: Progress,
        stopped_early: bool,
        pause: TrainUnit | None = None,
    ) -> TrialResult:
        newest = self._uploads.newest
        uuid = newest.uuid if newest else None
        if uuid is None and start.restore == "everything":
            uuid = start.uuid
        trained = progress.batches_trained
        return result_of(self._launch, trained, progress, uuid, stopped_early, pause)

    # ------------------------------------------------------------------------- before training

    def _fetch_resume_point(self) -> ResumePoint:
        def damage_of(point: ResumePoint) -> str | None:
            require_convertible(self._launch, point)
            return None if point is self._fetched else fetch(self._launch, point)

        points = [self._fetched] if self._fetched else self._run.resume_points()
        start = fetch_first_intact(points, damage_of, self._run.observer.notice)
        if start.checkpoint is not None:
            self._run.logger.info("starting from checkpoint %s", start.uuid)
        return start

    def _progress_at(self, start: ResumePoint) -> Progress:
        progress = start.at_batches_of(self._launch.answers.batch_samples)
        metric, reported = self._run.metric, start.metrics.get("validation", {})
        is_validated = progress.validated_at == progress.batches_trained
        lacks = progress.best_metric is None
        if self._schedule.pause_at is not None:  # which needs the metric of this very validation
            lacks = lacks or not is_number(reported.get(metric or ""))
        if metric is not None and lacks and is_validated:
            # That validation lacked the searcher metric, which may have been corrected.
            return replace(progress, validated_at=None)
        return progress

    def _build_loaders(self, start: ResumePoint, progress: Progress) -> EpochLength | None:
        launch, begin = self._launch, progress.batches_trained
        epoch = build_loaders(launch, start)
        self._uploads.own.check_periods(epoch)
        continues = start.checkpoint is not None and start.restore == "everything"
        launch.status.saved_at = begin if continues else None
        end = launch.status.end = in_batches(self._schedule.max_length, epoch)
        batch_samples = launch.answers.batch_samples
        self._run.observer.samples_trained(begin * batch_samples + progress.extra_samples)
        self._run.observer.run_started(self._run.trial, end, begin, batch_samples)
        if self._saves_continuously:  # nothing of this launch is durable yet
            launch.slots.break_training()
        return epoch

    def _lacks_metric(self) -> bool:
        """Return whether a batch of the validation set shows that the searcher metric is missing.

        Not tried if a validation has reported the metric, or if trying costs more than it saves.
        If a callback may add the metric, that is only a warning.
        """
        metric, answers = self._run.metric, self._launch.answers
        if metric is None or metric in answers.metrics.get("validation", {}):
            return False
        if self._run.test_mode:  # it validates after a single batch
            return False
        names = check_metrics(self._launch)
        if names is None or metric in (names := [*names, *self._uploads.own.metric_names]):
            return False
        error = not_reported(metric, names)
        if answers.may_add_metrics:
            self._run.logger.warning(
                "%s, or add it in on_validation_end, as a callback may do", error
            )
            return False
        self._mistake = error
        return True

    # --------------------------------------------------------------------------- the workloads

    def _work(self, progress: Progress, epoch: EpochLength | None) -> Progress:
        """Train, validate and save until nothing more is due."""
        launch, uploads = self._launch, self._uploads
        while not isinstance(work := next_workload(progress, self._schedule, epoch), Finish):
            if isinstance(work, Train):
                progress = self._train(work, progress)
            elif isinstance(work, Validate):
                progress = self._validate(progress)
            elif isinstance(work, Checkpoint):
                if (without := self._without_saving(work, progress)) is not None:
                    progress = without
                    continue
                progress = self._save(progress)
            progress = self._stored(uploads.poll, progress)
            wrong = self._mistake or uploads.own.mistake
            progress = progress.stopping(launch.should_stop or wrong is not None)
        return progress

    def _train(self, work: Train, progress: Progress) -> Progress:
        launch, trained = self._launch, progress.batches_trained
        reached = train_workload(launch, trained, work.until)
        if reached > trained:
            progress = progress.after_training(reached, launch.answers.extra_samples)
            call_hook(launch, "on_training_workload_end", reached)
            if not launch.answers.stop_requested:  # else the trial has decided how the run ends
                self._mistake = launch.losses.failure(
                    self._is_last(reached), launch.status.saved_at
                )
        return progress

    def _validate(self, progress: Progress) -> Progress:
        """Validate and report. A mistake is raised later, once the run has saved.

        A validation without the searcher metric is only warned of, unless the last one was so, too.
        """
        launch, own, trained = self._launch, self._uploads.own, progress.batches_trained
        if not validate(launch, trained):  # broken off by a stop request
            return progress
        call_hook(launch, "on_validation_end", trained)
        own.run_blocking("validate", trained)
        metric = None
        try:
            metric = report_validation(launch, trained)
        except TrialError as mistake:
            if self._lacked_metric or own.mistake or self._run.test_mode:
                self._mistake = own.mistake or mistake
            else:
                launch.warn([f"this validation does not count as the best: {mistake}"])
        self._lacked_metric = self._run.metric is not None and metric is None
        if self._mistake is None:
            own.start_beside("validate", trained)
        return progress.after_validation(metric, self._schedule.smaller_is_better)

    def _without_saving(self, work: Checkpoint, progress: Progress) -> Progress | None:
        """The progress if the checkpoint is withheld or postponed; None if it is saved now."""
        trained = progress.batches_trained
        if self._launch.withholds_checkpoint(trained, self._is_last(trained)):
            return progress.after_checkpoint()  # as if there were nothing to save
        return None if self._has_room(work, progress) else progress.postponing_checkpoint()

    def _save(self, progress: Progress) -> Progress:
        launch, trained = self._launch, progress.batches_trained
        progress = self._stored(self._uploads.finish, progress)  # one upload runs at a time
        self._staged = staged = checkpoint_save(launch, progress)
        self._saved_before = launch.status.saved_at
        launch.has_saved(trained)
        call_hook(launch, "on_checkpoint_write_end", trained)
        call_hook(launch, "on_checkpoint_end", trained)
        launch.has_refused = False
        self._uploads.start(staged)
        self._uploads.call_at_end(self._upload_ended)
        return progress.after_checkpoint()

    def _upload_ended(self) -> None:
        """End the train-workload if a checkpoint is due. Called in another thread."""
        if self._saves_continuously or self._launch.has_refused:
            self._launch.slots.break_training()

    def _stored(self, finish: Callable[[], None], progress: Progress) -> Progress:
        """Finish the upload. If a rank has copied it wrongly, a checkpoint is due at once.

        The ranks have the right weights, and that one copies before training continues from now
        on, so each can cause this once.
        """
        launch, run, staged = self._launch, self._run, self._staged
        try:
            finish()
        except WeightsChanged as failure:
            if staged is None:
                raise
            launch.warn([
                f"the checkpoint at batch {staged.progress.batches_trained} is not stored: "
                f"{failure}. The ranks save again, and copy before training continues where this "
                "was seen; for all ranks, set checkpointing.snapshot: eager"
            ])  # fmt: skip
            launch.status.saved_at = self._saved_before
            launch.ask(ReleaseStaging(uuid=staged.uuid), Done)
            if run.fence is not None and not launch.should_stop:  # else the next run sweeps
                leftover_of = "the refused upload"
                sweep_leftovers(run.store, run.trial, run.fence, run.logger, leftover_of)
            return progress.after_refusal(staged.progress)
        return progress

    def _has_room(self, work: Checkpoint, progress: Progress) -> bool:
        """Return whether to save now, though that may wait for the upload before it."""
        if self._uploads.is_busy:
            if work.is_optional and self._saves_continuously:
                return False  # the end of the upload ends the next train-workload
            if work.is_optional and self._run.config.checkpointing.when_busy == "postpone":
                if progress.postponed_at is None:
                    self._run.logger.info(
                        "the checkpoint at batch %d is postponed: the last one is still being "
                        "uploaded",
                        progress.batches_trained,
                    )
                    self._uploads.call_at_end(self._launch.slots.break_training)
                return False
            self._run.logger.info("training waits: the last checkpoint is still being uploaded")
        return True

    @property
    def _saves_continuously(self) -> bool:
        return self._schedule.checkpoint_period == "continuous"

    def _is_last(self, batches_trained: int) -> bool:
        """Return whether training ends here, other than by the trial's own request."""
        launch = self._launch
        is_stopped = launch.should_stop and not launch.answers.stop_requested
        return is_stopped or batches_trained >= launch.status.end


def result_of(
    launch: Launch,
    batches_trained: int,
    progress: Progress,
    uuid: str | None,
    stopped_early: bool,
    pause: TrainUnit | None,
) -> TrialResult:
    """The result of a launch that has ended; `uuid` is the newest checkpoint's."""
    metrics = launch.answers.metrics
    return TrialResult(
        trial=launch.run.trial,
        batches_trained=batches_trained,
        stopped_early=stopped_early,
        stop_reason=describe_pause(pause),
        training_metrics=metrics.get("training", {}),
        validation_metrics=metrics.get("validation", {}),
        validated_at=progress.validated_at,
        checkpoint_uuid=uuid,
        checkpoint_at=launch.status.saved_at,
        checkpoint_url=launch.run.store.files_url(uuid) if uuid else None,
        changes=launch.answers.changes,
    )


def wind_up(
    launch: Launch,
    uploads: Uploads,
    batches_trained: int,
    stopped_early: bool,
    mistake: TrialError | None = None,
    pause: TrainUnit | None = None,
) -> None:
    """Finish the parallel work, after the last hook of a trial or the end of a script.

    Args:
        stopped_early: see `TrialResult`.
        mistake: the error that the run ends with, if there is one.
        pause: where the trial waits, to be trained further later; None if it does not.

    Raises:
        TrialError: `mistake`, or the failure of a stage of the user's own.
    """
    own = uploads.own
    own.finish()
    is_asked = launch.run.stopping.request is not None or pause is not None
    continues = is_asked or launch.moves_after(stopped_early)
    if not continues and mistake is None and own.mistake is None:  # also after a stop by the trial
        own.run_blocking("training", batches_trained, uploads.newest)
    uploads.pruning.finish()
    if launch.answers.writes_run_files:
        launch.status.tensorboard_url = upload_run_files(launch, batches_trained)
    if (error := mistake or own.mistake) is not None:
        raise error
