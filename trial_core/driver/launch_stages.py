"""What the run loop calls: the stages of one launch, with what each of them needs to know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.driver.run import Launch
from trial_core.driver.run_loop import Validation
from trial_core.driver.stages import Stages
from trial_core.driver.stages.validate import report_validation
from trial_core.driver.uploads import Uploads
from trial_core.errors import TrialError
from trial_core.messages import Done, ReleaseStaging
from trial_core.schedule.sequencer import Progress, Schedule
from trial_core.schedule.units import Batch, EpochLength, in_batches


class LaunchStages:
    """The stages of a launch. See `RunStages` for what each method means.

    Args:
        stages: what executes them.
        schedule: None: the experiment's.
        fetched: the resume point, if its files are fetched already; None: it is to be chosen.
    """

    def __init__(
        self,
        launch: Launch,
        stages: Stages,
        uploads: Uploads,
        schedule: Schedule | None = None,
        fetched: ResumePoint | None = None,
    ) -> None:
        run = launch.run
        self._launch = launch
        self._stages = stages
        self._uploads = uploads
        self._schedule = schedule or run.config.schedule()
        self._fetched = fetched
        self.trial = run.trial
        self.store = run.store
        self.metrics = launch.answers.metrics
        self.metric = run.metric
        self.postpones_when_busy = run.config.checkpointing.when_busy == "postpone"
        self.how_to_go_on = run.how_to_go_on
        self._has_mistake = False
        self.logger = run.logger

    @property
    def newest_checkpoint(self) -> str | None:
        return self._uploads.newest.uuid if self._uploads.newest else None

    @property
    def saved_at(self) -> int | None:
        return self._launch.progress.saved_at

    @property
    def is_uploading(self) -> bool:
        return self._uploads.is_busy

    def resume_points(self) -> Iterable[ResumePoint]:
        run = self._launch.run
        self._uploads.own.check()
        return [self._fetched] if self._fetched else run.resume_points()

    def fetch(self, point: ResumePoint) -> str | None:
        require_convertible(self._launch, point)
        is_there = point is self._fetched
        return None if is_there else fetch(self._launch, self._stages, point)

    def schedule(self, progress: Progress) -> Schedule:
        if self._launch.run.test_mode:
            end = Batch(progress.batches_trained + 1)
            self._schedule = Schedule(end, reporting_period=end, checkpoint_policy="none")
        return self._schedule

    def build_loaders(self, point: ResumePoint) -> EpochLength | None:
        launch, begin = self._launch, point.progress.batches_trained
        epoch = self._stages.build_loaders(launch, point)
        self._uploads.own.check_periods(epoch)
        continues = point.checkpoint is not None and point.restore == "everything"
        launch.progress.saved_at = begin if continues else None
        end = launch.progress.end = in_batches(self._schedule.max_length, epoch)
        samples = launch.answers.batch_samples
        launch.run.observer.run_started(self.trial, end, begin, samples)
        if self._saves_continuously:  # nothing of this launch is durable yet
            launch.slots.break_training()
        return epoch

    @property
    def _saves_continuously(self) -> bool:
        return self._schedule.checkpoint_period == "continuous"

    def run_hook(self, hook: str, batches_trained: int, **arguments: Any) -> None:
        if hook in self._launch.answers.hooks:
            self._stages.callbacks(self._launch, hook, batches_trained, arguments)
        if hook == "on_training_start":  # from here on a stop request saves first
            self._launch.may_save()

    def metric_names(self) -> list[str] | None:
        if self._launch.run.test_mode:  # which validates after a single batch
            return None
        names = self._stages.check_metrics(self._launch)
        return None if names is None else [*names, *self._uploads.own.metric_names]

    @property
    def may_add_metrics(self) -> bool:
        return self._launch.answers.may_add_metrics

    def train(self, begin: int, until: int) -> int:
        return self._stages.train_workload(self._launch, begin, until)

    def validate(self, batches_trained: int) -> bool:
        return self._stages.validate(self._launch, batches_trained)

    def report_validation(self, batches_trained: int) -> Validation:
        own = self._uploads.own
        own.run_blocking("validate", batches_trained)
        try:
            validation = Validation(report_validation(self._launch, batches_trained), own.mistake)
        except TrialError as mistake:
            self._has_mistake = True
            return Validation(mistake=own.mistake or mistake)
        own.start_beside("validate", batches_trained)
        return validation

    def loss_failure(self, batches_trained: int) -> TrialError | None:
        if self._launch.answers.stop_requested:  # the trial has decided how the run ends
            return None
        failure = self._launch.losses.failure(self._is_last(batches_trained), self.saved_at)
        self._has_mistake = failure is not None
        return failure

    def withholds_checkpoint(self, batches_trained: int) -> bool:
        return self._launch.withholds_checkpoint(batches_trained, self._is_last(batches_trained))

    def _is_last(self, batches_trained: int) -> bool:
        """Whether training ends here, other than by the trial's own request."""
        launch = self._launch
        is_stopped = launch.should_stop and not launch.answers.stop_requested
        return is_stopped or batches_trained >= launch.progress.end

    def save(self, progress: Progress) -> StagedCheckpoint:
        staged = self._stages.checkpoint_save(self._launch, progress)
        self._launch.has_saved(progress.batches_trained)
        return staged

    def start_upload(self, staged: StagedCheckpoint) -> None:
        if self._launch.run.test_mode == "keep nothing":
            self._launch.ask(ReleaseStaging(uuid=staged.uuid), Done)
            return
        self._uploads.start(staged)
        if self._saves_continuously:
            self.break_training_after_upload()

    def break_training_after_upload(self) -> None:
        self._uploads.call_at_end(self._launch.slots.break_training)

    def finish_upload(self) -> None:
        self._after_upload(self._uploads.wait())

    def poll(self) -> bool:
        self._after_upload(self._uploads.take_ended())
        self._uploads.own.poll()
        return self._launch.should_stop or self._uploads.own.mistake is not None

    def finish(self, batches_trained: int, stopped_early: bool) -> None:
        own = self._uploads.own
        self._finish_own_stages(batches_trained, stopped_early)
        self._uploads.finish_pruning()
        if self._launch.answers.writes_run_files:
            url = self._stages.upload_run_files(self._launch, batches_trained)
            self._launch.progress.tensorboard_url = url
        if own.mistake is not None and not self._has_mistake:  # else the run raises that
            raise own.mistake

    def _finish_own_stages(self, batches_trained: int, stopped_early: bool) -> None:
        own = self._uploads.own
        own.finish()
        launch = self._launch
        continues = launch.run.stopping.request is not None or launch.moves_after(stopped_early)
        is_wrong = own.mistake is not None or self._has_mistake
        if not continues and not is_wrong:  # also if the trial has ended itself
            own.run_blocking("training", batches_trained, self._uploads.newest)

    def _after_upload(self, committed: Manifest | None) -> None:
        if committed is not None:
            at = committed.progress.batches_trained
            self.run_hook("on_checkpoint_upload_end", at, uuid=committed.uuid)
            self._uploads.own.run_blocking("checkpoint-upload", at, committed)
            self._uploads.prune(at)
            self._uploads.own.start_beside("checkpoint-upload", at, committed)


def require_convertible(launch: Launch, point: ResumePoint) -> None:
    """Check that the ranks can restore a resume point's checkpoint.

    Raises:
        TopologyMismatch: they cannot.
    """
    if launch.answers.topology is not None:
        point.require_convertible(launch.answers.topology)


def fetch(launch: Launch, stages: Stages, point: ResumePoint) -> str | None:
    """Fetch a resume point's checkpoint to the ranks. Return what is damaged; None if intact.

    Raises:
        StorageError: the storage failed.
    """
    if point.checkpoint is None:
        return None
    if launch.run.claim is not None:  # first, so that it is not pruned meanwhile
        launch.run.claim.renew(point.checkpoint.name)
    return stages.fetch_checkpoint(launch, point.checkpoint, point.restore)
