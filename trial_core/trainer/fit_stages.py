"""The stages of a run in a script, as one of its ranks carries them out.

The ranks have no driver. They exchange a few plain objects between stages instead.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import Logger, LoggerAdapter
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.code_objects import RunCode
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, Manifest, StoredCode
from trial_core.checkpoint.resume_point import Restore, ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.context import RunInfo
from trial_core.controller.collective_errors import (
    Outcome,
    outcome_of,
    run_on_all_ranks,
    run_on_rank_0,
)
from trial_core.controller.controller import Controller
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointError, StorageError, TrialError
from trial_core.ledger.run_clock import RunClock
from trial_core.messages import (
    BuildLoaders,
    FetchCheckpoint,
    Fetched,
    FinishRunFiles,
    NameMetrics,
    PersistCheckpoint,
    ReleaseStaging,
    RunHook,
    RunValidation,
    SaveCheckpoint,
    TrainBatches,
    TrialBuilt,
)
from trial_core.retention.claims import RunClaim
from trial_core.retention.pruning import prune_trial
from trial_core.run.run_loop import Validation
from trial_core.run.searcher_metric import searcher_metric, with_single_number
from trial_core.run.sequencer import Progress, Schedule
from trial_core.text_format import metrics_line, training_speed
from trial_core.trainer.background_upload import POLL_SECONDS, BackgroundUpload, retry_storage
from trial_core.trainer.commit_rendezvous import CommitRendezvous
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.units import Batch, EpochLength

HOW_TO_GO_ON = (
    "to train it further, give fit a greater max_length; to begin a new trial, leave out "
    "latest_checkpoint"
)


@dataclass
class FitStages:
    """`RunStages` of a script, on one of its ranks. Every method is collective.

    Attributes:
        controller: has the trial attached.
        built: the controller's description of the trial.
        config: the script's experiment.
        full_schedule: the schedule of `fit`'s arguments.
        points: what the run may resume from, best first.
        metric: the name of the searcher metric; None: the run has none.
        test_mode: train and validate one batch, and keep no checkpoint.
        is_stop_requested: whether this rank was asked from outside to save and end.
        fence: lets rank 0 commit; None on other ranks and in test mode.
        claim: announces which checkpoint rank 0 restores; None on other ranks and in test mode.
        code: the trial's code, on rank 0; None: checkpoints name no code.
        clock: measures what the ranks do.
        metrics: the last ones of each kind.
        newest_checkpoint: uuid of the newest checkpoint that this run has committed.
    """

    controller: Controller
    built: TrialBuilt
    info: RunInfo
    distributed: DistributedContext
    store: CheckpointStore
    config: ExperimentConfig
    full_schedule: Schedule
    points: Sequence[ResumePoint]
    metric: str | None = None
    test_mode: bool = False
    is_stop_requested: Callable[[], bool] = lambda: False
    fence: Fence | None = None
    claim: RunClaim | None = None
    code: RunCode | None = None
    clock: RunClock = field(default_factory=RunClock)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    newest_checkpoint: str | None = None

    def __post_init__(self) -> None:
        self.trial = self.info.trial
        self.logger: Logger | LoggerAdapter[Any] = _logger_of(self.distributed.get_rank())
        self.skips_when_busy = self.config.checkpointing.when_busy == "skip"
        self.how_to_go_on = HOW_TO_GO_ON
        self._attempt = uuids.uuid4().hex if self.fence is None else self.fence.attempt
        self._should_stop = False
        self._epoch: EpochLength | None = None
        self._stored_code: StoredCode | None = None
        self._pending: tuple[StagedCheckpoint, BackgroundUpload] | None = None
        self._validated: dict[str, Any] = {}

    @property
    def is_uploading(self) -> bool:
        return self._pending is not None

    # ---------------------------------------------------------------------------- the stages

    def resume_points(self) -> Sequence[ResumePoint]:
        return self.points

    def fetch(self, point: ResumePoint) -> str | None:
        if point.checkpoint is None:
            return None
        point.require_convertible(self.built.topology)
        with self.clock.in_stage("fetch-checkpoint"):
            damage = self._fetch(point.checkpoint, point.restore)
        if damage is not None:
            self.logger.error("checkpoint %s cannot be used: %s", point.uuid, damage)
        return damage

    def schedule(self, progress: Progress) -> Schedule:
        if not self.test_mode:
            return self.full_schedule
        end = Batch(progress.batches_trained + 1)
        return Schedule(max_length=end, reporting_period=end, checkpoint_policy="none")

    def build_loaders(self, point: ResumePoint) -> EpochLength | None:
        self.clock.starts_at(point.progress.batches_trained)
        with self.clock.in_stage("build-loaders"):
            built = self.controller.build_loaders(
                BuildLoaders(
                    batches_trained=point.progress.batches_trained,
                    checkpoint=point.uuid,
                    restore=point.restore,
                    saved_by=point.saved_by,
                    validation_limit=1 if self.test_mode else None,
                )
            )
            self.clock.count_as("restore", built.restore_seconds)
        self._epoch = built.epoch
        return self._epoch

    def run_hook(self, hook: str, batches_trained: int, **arguments: Any) -> None:
        if hook in self.built.hooks:
            with self.clock.in_stage("callbacks", hook):
                done = self.controller.run_hook(RunHook(hook=hook, arguments=arguments))
            if done.metrics is not None:
                self._validated = done.metrics

    def metric_names(self) -> list[str] | None:
        if self.test_mode:  # which validates after a single batch
            return None
        with self.clock.in_stage("check-metrics"):
            return self.controller.name_metrics(NameMetrics()).names

    @property
    def may_add_metrics(self) -> bool:
        return any(self.distributed.allgather("on_validation_end" in self.built.hooks))

    def train(self, begin: int, until: int) -> int:
        with self.clock.in_stage("train-workload"):
            trained = self.controller.train(TrainBatches(until=until))
            reached = trained.batches_trained
            self.clock.batches_trained(reached)
        if reached > begin:
            self.metrics["training"] = trained.metrics
            speed = training_speed(reached - begin, self.built.batch_samples, trained.seconds)
            self.logger.info(
                "trained [%d→%d] at %s: %s", begin, reached, speed, metrics_line(trained.metrics)
            )
        return reached

    def validate(self, batches_trained: int) -> bool:
        with self.clock.in_stage("validate"):
            validated = self.controller.validate(RunValidation())
        self._validated = validated.metrics
        return not validated.is_broken_off

    def report_validation(self, batches_trained: int) -> Validation:
        # Callbacks may have changed the metrics of each rank; those of rank 0 count.
        metrics = with_single_number(self.distributed.broadcast(self._validated), self.metric)
        self.logger.info("validated at %d: %s", batches_trained, metrics_line(metrics))
        try:
            value = None if self.metric is None else searcher_metric(metrics, self.metric)
        except TrialError as mistake:  # on every rank: all have the same metrics
            return Validation(mistake=mistake)
        self.metrics["validation"] = metrics
        return Validation(value)

    def save(self, progress: Progress) -> StagedCheckpoint:
        uuid = self.distributed.broadcast(str(uuids.uuid4()))
        with self.clock.in_stage("checkpoint-save"):
            self.controller.save_checkpoint(SaveCheckpoint(uuid=uuid))
        return StagedCheckpoint.now(uuid, progress, self.metrics)

    def start_upload(self, staged: StagedCheckpoint) -> None:
        if self.test_mode:
            self.controller.release_staging(ReleaseStaging(uuid=staged.uuid))
            return
        rendezvous = CommitRendezvous.of(self.distributed, staged.uuid)
        self._pending = staged, BackgroundUpload(lambda: self._upload(staged, rendezvous))

    def finish_upload(self) -> None:
        with self.clock.spending("checkpoint_stall"):
            while self._pending is not None:
                self._conclude(self.distributed.allgather(self._pending[1].outcome(POLL_SECONDS)))

    def poll(self) -> bool:
        outcome = None if self._pending is None else self._pending[1].outcome()
        wants_stop = self.info.stop_requested or self.is_stop_requested()
        ranks = self.distributed.allgather((wants_stop, outcome))
        self._should_stop |= any(wants_stop for wants_stop, _ in ranks)
        self._conclude([outcome for _, outcome in ranks])
        return self._should_stop

    def finish(self, batches_trained: int) -> None:
        self.controller.finish_run_files(FinishRunFiles())
        self.controller.close()

    # ----------------------------------------------------------------------------- internals

    def _fetch(self, manifest: Manifest, restore: Restore) -> str | None:
        """Fetch a checkpoint to this machine. Return what is damaged; None if it is intact."""
        # First, so that the checkpoint is not pruned meanwhile. Only rank 0 has the claim.
        run_on_rank_0(self.distributed, lambda: self._claim(manifest.name))
        request = FetchCheckpoint(
            uuid=manifest.uuid,
            files=manifest.files,
            saved_by=manifest.topology,
            restore=restore,
        )

        def fetch() -> Fetched:
            fetched = self.controller.fetch_checkpoint(request)
            if fetched.problem:
                raise StorageError(
                    f"checkpoint {manifest.uuid} cannot be fetched: {fetched.problem}"
                )
            return fetched

        ranks = run_on_all_ranks(self.distributed, lambda: retry_storage(fetch))
        return next((rank.damage for rank in ranks if rank.damage), None)

    def _claim(self, name: layout.ManifestName) -> None:
        if self.claim is not None:
            self.claim.renew(name)

    def _upload(self, staged: StagedCheckpoint, rendezvous: CommitRendezvous) -> Outcome:
        """Upload this rank's part, and commit it with the others'. Not collective."""

        def begin() -> None:
            self._stored_code = self.store.announce_upload(
                self.trial, staged.uuid, self._attempt, self.fence, self.code
            )

        def upload() -> list[FileEntry]:
            rendezvous.begin(lambda: retry_storage(begin))
            return retry_storage(lambda: self._persist(staged.uuid))

        return rendezvous.commit(outcome_of(upload), lambda files: self._commit(staged, files))

    def _persist(self, uuid: str) -> list[FileEntry]:
        persisted = self.controller.persist_checkpoint(PersistCheckpoint(uuid=uuid))
        if persisted.problem:
            raise StorageError(persisted.problem)
        if persisted.mistake:
            raise CheckpointError(persisted.mistake)
        return persisted.files

    def _commit(self, staged: StagedCheckpoint, files: list[list[FileEntry]]) -> int:
        """Commit the files of all ranks, then prune. Return the checkpoint's size in bytes."""
        manifest = staged.manifest(
            dict(enumerate(files)),
            trial=self.trial,
            attempt=self._attempt,
            config=self.config,
            topology=self.built.topology,
            versions=self.built.versions,
            epoch=self._epoch,
            code=self._stored_code,
        )
        retry_storage(lambda: self.store.commit(manifest, self.fence))
        rules, searcher = self.config.checkpoint_storage, self.config.searcher
        policy = rules.retention(self.metric, searcher.smaller_is_better)
        if policy is not None:
            prune_trial(self.store, policy, self.config.name, self.trial, self.logger)
        return manifest.total_bytes

    def _conclude(self, outcomes: list[Outcome | None]) -> None:
        """Finish the upload once it has ended on all ranks, or raise its first error."""
        ended = [outcome for outcome in outcomes if outcome is not None]
        for outcome in ended:
            outcome.raise_error()
        if self._pending is None or len(ended) < len(outcomes):
            return
        (staged, _), self._pending = self._pending, None
        self.controller.release_staging(ReleaseStaging(uuid=staged.uuid))
        self.newest_checkpoint = staged.uuid
        self.logger.info("checkpoint %s committed: %d bytes", staged.uuid, ended[0].result)
        batches_trained = staged.progress.batches_trained
        self.run_hook("on_checkpoint_upload_end", batches_trained, uuid=staged.uuid)


def _logger_of(rank: int) -> Logger:
    """This module's logger on rank 0; on other ranks, which would log the same, a silent one."""
    if rank == 0:
        return logging.getLogger(__name__)
    silent = Logger(__name__)
    silent.disabled = True
    return silent
