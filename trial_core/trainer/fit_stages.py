"""The stages of a run in a script of the user's own, as one of its ranks carries them out.

They are those of the flow's tasks. What the driver sees to there, the ranks see to by exchanging a
few plain objects between stages.
"""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Callable
from logging import ERROR, INFO, WARNING
from typing import Any

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.resume_point import Restore, ResumePoint, no_intact_checkpoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.context import RunInfo
from trial_core.controller.collective_errors import (
    Outcome,
    attempt,
    on_every_rank,
    on_the_first_rank,
    raise_error,
)
from trial_core.controller.controller import Controller
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointError, StorageError
from trial_core.messages import (
    BuildLoaders,
    FetchCheckpoint,
    Fetched,
    FinishRunFiles,
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
from trial_core.run.searcher_metric import searcher_metric
from trial_core.run.sequencer import Progress
from trial_core.trainer.background_upload import BackgroundUpload, persistently
from trial_core.trainer.commit_rendezvous import CommitRendezvous
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.units import EpochLength

logger = logging.getLogger(__name__)

# How often ranks that wait for each other's uploads say so: well within a collective's deadline.
POLL_SECONDS = 30.0


class FitStages:
    """One fit of a trial, as one of its ranks carries it out. Every method is collective.

    Args:
        controller: has the trial already.
        built: what it said of it.
        config: the script's experiment.
        metric: the validation metric that says what is best; None: nothing does.
        test_mode: validate one batch only, and keep no checkpoint.
        is_told_to_end: whether somebody else has asked this rank to save and end.
        fence: rank 0's, which commits; None on the others, and where nothing is kept.
        claim: rank 0's, by which others know what this fit has started from; None likewise.

    Attributes:
        metrics: the last ones of each kind.
        newest: uuid of the trial's newest committed checkpoint.
    """

    def __init__(
        self,
        controller: Controller,
        built: TrialBuilt,
        info: RunInfo,
        distributed: DistributedContext,
        store: CheckpointStore,
        config: ExperimentConfig,
        metric: str | None,
        test_mode: bool,
        is_told_to_end: Callable[[], bool] = lambda: False,
        fence: Fence | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        self.test_mode = test_mode
        self._is_told_to_end = is_told_to_end
        self._controller = controller
        self._built = built
        self._info = info
        self._distributed = distributed
        self.store = store
        self._config = config
        self._metric = metric
        self._fence = fence
        self._claim = claim
        self._attempt = uuids.uuid4().hex if fence is None else fence.attempt
        self.metrics: dict[str, dict[str, Any]] = {}
        self.newest: str | None = None
        self._stop_requested = False
        self._epoch: EpochLength | None = None
        self._pending: tuple[StagedCheckpoint, BackgroundUpload] | None = None

    # ---------------------------------------------------------------------------- the stages

    def fetch_start(self, starts: list[ResumePoint]) -> ResumePoint:
        """Bring the first of `starts` that is whole to this machine, every file verified.

        Raises:
            CheckpointDamaged: none is whole; says what is wrong with the last one.
            StorageError: the storage does not give one. It may be whole, so none takes its place.
        """
        damage: str | None = None
        for start in starts:
            if start.checkpoint is None:
                return start
            start.require_convertible(self._built.topology)
            damage = self._fetch(start.checkpoint, start.restore)
            if damage is None:
                self.metrics = start.metrics
                if start.restore == "everything":
                    self.newest = start.checkpoint.uuid
                self._say("starting from checkpoint %s", start.checkpoint.uuid)
                return start
            self._say(
                "checkpoint %s cannot be used: %s", start.checkpoint.uuid, damage, level=ERROR
            )
        raise no_intact_checkpoint(starts, str(damage))

    def build_loaders(self, start: ResumePoint) -> EpochLength | None:
        """Build the data loaders and restore what was fetched; how long an epoch is."""
        self._epoch = self._controller.build_loaders(
            BuildLoaders(
                batches_trained=start.progress.batches_trained,
                checkpoint=start.uuid,
                restore=start.restore,
                saved_by=start.saved_by,
                validation_limit=1 if self.test_mode else None,
            )
        ).epoch
        return self._epoch

    def train(self, begin: int, until: int) -> int:
        """Train from `begin` until `until` batches have been trained in all; how many that is."""
        trained = self._controller.train(TrainBatches(until=until))
        reached = trained.batches_trained
        if reached > begin:
            self.metrics["training"] = trained.metrics
            samples_per_second = (reached - begin) * self._built.batch_samples / trained.seconds
            self._say(
                "trained [%d→%d] at %.1f samples/s: %s", begin, reached, samples_per_second,
                trained.metrics,
            )  # fmt: skip
        return reached

    def validate(self, batches_trained: int) -> bool:
        """Validate on the whole set; False: broken off, since the run is to stop."""
        validated = self._controller.validate(RunValidation())
        if validated.is_broken_off:
            return False
        self.metrics["validation"] = validated.metrics
        self._say("validation at %d: %s", batches_trained, validated.metrics)
        return True

    def searcher_metric(self) -> float | None:
        """The searcher's metric in the last validation, if there is such a metric.

        Raises:
            TrialError: on every rank alike, if the trial does not report it.
        """
        if self._metric is None:
            return None
        return searcher_metric(self.metrics["validation"], self._metric)

    def has_room(self, is_optional: bool) -> bool:
        """Whether the next checkpoint may be saved: there is one upload at a time, beside training.

        Waits for the one under way, unless `is_optional` and the experiment would rather skip.
        Raises as `settle`.
        """
        if self._pending is not None:
            if is_optional and self._config.checkpointing.when_busy == "skip":
                self._say(
                    "checkpoint skipped at batch %d: the last one is still being uploaded "
                    "(checkpointing.when_busy: skip)", self._info.batches_trained, level=WARNING,
                )  # fmt: skip
                return False
            self._say("training waits: the last checkpoint is still being uploaded")
        self.finish_upload()
        return True

    def save(self, progress: Progress) -> StagedCheckpoint:
        """Stage a checkpoint; training may go on when this returns."""
        uuid = self._distributed.broadcast(str(uuids.uuid4()))
        self._controller.save_checkpoint(SaveCheckpoint(uuid=uuid))
        return StagedCheckpoint.now(uuid, progress, self.metrics)

    def start_upload(self, staged: StagedCheckpoint) -> None:
        """Begin to store and commit what was staged, beside training. In test mode drop it instead.

        It is committed as soon as every rank's files are stored, wherever training is by then.
        """
        if self.test_mode:
            self._controller.release_staging(ReleaseStaging(uuid=staged.uuid))
            return
        meeting = CommitRendezvous.of(self._distributed, staged.uuid)
        self._pending = staged, BackgroundUpload(lambda: self._upload(staged, meeting))

    def settle(self) -> bool:
        """Exchange what may have happened on some rank; whether any is to stop.

        Tells the trial of the upload under way if it has ended; else leaves it be.

        Raises:
            CheckpointError: it failed on some rank, or could not be committed.
            DeadlineExceeded: a rank's part of it took far longer than the others'.
        """
        own = None if self._pending is None else self._pending[1].outcome()
        stops = self._info.stop_requested or self._is_told_to_end()
        everybody = self._distributed.allgather((stops, own))
        self._stop_requested |= any(stop for stop, _ in everybody)
        self._conclude([outcome for _, outcome in everybody])
        return self._stop_requested

    def finish_upload(self) -> None:
        """Wait for the upload under way, and tell the trial's callbacks. Raises as `settle`."""
        while self._pending is not None:
            self._conclude(self._distributed.allgather(self._pending[1].outcome(POLL_SECONDS)))

    def run_hook(self, hook: str, **arguments: Any) -> None:
        """Call one hook of every callback, if any overrides it."""
        if hook in self._built.hooks:
            self._controller.run_hook(RunHook(hook=hook, arguments=arguments))

    @property
    def trial(self) -> str:
        """The trial's id."""
        return self._info.trial

    def finish(self) -> None:
        """Training is over: end loader workers and the profiler, store files for TensorBoard."""
        self._controller.finish_run_files(FinishRunFiles())
        self._controller.close()

    # ----------------------------------------------------------------------------- internals

    def _fetch(self, manifest: Manifest, restore: Restore) -> str | None:
        """Bring a checkpoint to this machine; what is wrong with it, if something is."""
        # Before: it must not be pruned while it is fetched. Rank 0 alone has the claim.
        on_the_first_rank(self._distributed, lambda: self._claim_needs(manifest.uuid))
        request = FetchCheckpoint(
            uuid=manifest.uuid,
            files=manifest.files,
            saved_by=manifest.topology,
            restore=restore,
        )

        def fetch() -> Fetched:
            fetched = self._controller.fetch_checkpoint(request)
            if fetched.problem:
                raise StorageError(
                    f"checkpoint {manifest.uuid} cannot be fetched: {fetched.problem}"
                )
            return fetched

        everybody = on_every_rank(self._distributed, lambda: persistently(fetch))
        return next((rank.damage for rank in everybody if rank.damage), None)

    def _claim_needs(self, uuid: str) -> None:
        if self._claim is not None:
            self._claim.renew(uuid)

    def _upload(self, staged: StagedCheckpoint, meeting: CommitRendezvous) -> Outcome:
        """Store what this rank has staged, and see it committed with the others'. No collective."""

        def store() -> list[FileEntry]:
            meeting.begin(lambda: persistently(lambda: self._begin(staged.uuid)))
            return persistently(lambda: self._persist(staged.uuid))

        stored = attempt(store)
        return meeting.commit(stored, lambda files: self._commit(staged, files))

    def _begin(self, uuid: str) -> None:
        self.store.announce_upload(self._info.trial, uuid, self._attempt, self._fence)

    def _persist(self, uuid: str) -> list[FileEntry]:
        persisted = self._controller.persist_checkpoint(PersistCheckpoint(uuid=uuid))
        if persisted.problem:
            raise StorageError(persisted.problem)
        if persisted.mistake:
            raise CheckpointError(persisted.mistake)
        return persisted.files

    def _commit(self, staged: StagedCheckpoint, files: list[list[FileEntry]]) -> int:
        manifest = staged.manifest(
            dict(enumerate(files)),
            trial=self._info.trial,
            attempt=self._attempt,
            config=self._config,
            topology=self._built.topology,
            versions=self._built.versions,
            epoch=self._epoch,
        )
        persistently(lambda: self.store.commit(manifest, self._fence))
        rules, searcher = self._config.checkpoint_storage, self._config.searcher
        policy = rules.retention(self._metric, searcher.smaller_is_better)
        if policy is not None:
            prune_trial(self.store, policy, self._config.name, self._info.trial, logger)
        return manifest.total_bytes

    def _conclude(self, outcomes: list[Outcome | None]) -> None:
        """The upload under way is over if it has failed on some rank, or ended well on all."""
        ended = [outcome for outcome in outcomes if outcome is not None]
        for outcome in ended:
            raise_error(outcome)
        if self._pending is None or len(ended) < len(outcomes):
            return
        (staged, _), self._pending = self._pending, None
        self._controller.release_staging(ReleaseStaging(uuid=staged.uuid))
        self.newest = staged.uuid
        self._say("checkpoint %s committed: %d bytes", staged.uuid, ended[0].result)
        self.run_hook("on_checkpoint_upload_end", uuid=staged.uuid)

    def _say(self, message: str, *arguments: Any, level: int = INFO) -> None:
        if self._distributed.get_rank() == 0:
            logger.log(level, message, *arguments)
