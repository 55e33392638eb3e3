"""The stages of a run in a script of the user's own, as one of its ranks carries them out.

They are those of the flow's tasks. What the driver sees to there, the ranks see to by exchanging a
few plain objects between stages.
"""

from __future__ import annotations

import logging
import uuid as uuids
from typing import Any

from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.context import RunInfo
from trial_core.controller.controller import Controller
from trial_core.controller.together import on_every_rank, on_the_first_rank
from trial_core.controller.upload import Upload, persistently
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointDamaged, StorageError
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
from trial_core.searcher import searcher_metric
from trial_core.sequencer import Progress
from trial_core.staged import StagedCheckpoint
from trial_core.start import Start
from trial_core.units import EpochLength

logger = logging.getLogger(__name__)

# How often ranks that wait for each other's uploads say so: well within a collective's deadline.
POLL_SECONDS = 30.0


class Fit:
    """One fit of a trial, as one of its ranks carries it out. Every method is collective.

    Args:
        controller: has the trial already.
        built: what it said of it.
        config: the script's experiment.
        metric: the validation metric that says what is best; None: nothing does.
        test_mode: validate one batch only, and keep no checkpoint.

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
    ) -> None:
        self.test_mode = test_mode
        self._controller = controller
        self._built = built
        self._info = info
        self._distributed = distributed
        self.store = store
        self._config = config
        self._metric = metric
        self._attempt = uuids.uuid4().hex
        self.metrics: dict[str, dict[str, Any]] = {}
        self.newest: str | None = None
        self._stop_requested = False
        self._pending: tuple[StagedCheckpoint, Upload] | None = None

    # ---------------------------------------------------------------------------- the stages

    def fetch_start(self, starts: list[Start]) -> Start:
        """Bring the first of `starts` that is whole to this machine, every file verified.

        Raises:
            CheckpointDamaged: none is whole; says what is wrong with the last one.
        """
        damage: str | None = None
        for start in starts:
            if start.checkpoint is None:
                return start
            start.require_ranks(self._distributed.get_size())
            damage = self._fetch(start.checkpoint)
            if damage is None:
                self.metrics = start.metrics
                if start.restore == "everything":
                    self.newest = start.checkpoint.uuid
                self._say("starting from checkpoint %s", start.checkpoint.uuid)
                return start
            self._say("checkpoint %s cannot be used: %s", start.checkpoint.uuid, damage)
        raise CheckpointDamaged(damage or "there is nothing to start from")

    def build_loaders(self, start: Start) -> EpochLength | None:
        """Build the data loaders and restore what was fetched; how long an epoch is."""
        return self._controller.build_loaders(
            BuildLoaders(
                batches_trained=start.progress.batches_trained,
                checkpoint=start.uuid,
                restore=start.restore,
                validation_limit=1 if self.test_mode else None,
            )
        ).epoch

    def train(self, begin: int, until: int) -> int:
        """Train from `begin` until `until` batches have been trained in all; how many that is."""
        trained = self._controller.train(TrainBatches(until=until))
        self.metrics["training"] = trained.metrics
        samples_per_second = (until - begin) * self._built.batch_samples / trained.seconds
        self._say(
            "trained [%d→%d] at %.1f samples/s: %s", begin, until, samples_per_second,
            trained.metrics,
        )  # fmt: skip
        return trained.batches_trained

    def validate(self, batches_trained: int) -> float | None:
        """Validate; the value of the searcher's metric, if there is one.

        Raises:
            TrialError: the trial does not report the searcher's metric.
        """
        metrics = self._controller.validate(RunValidation()).metrics
        self.metrics["validation"] = metrics
        self._say("validation at %d: %s", batches_trained, metrics)
        return None if self._metric is None else searcher_metric(metrics, self._metric)

    def save(self, progress: Progress) -> StagedCheckpoint:
        """Stage a checkpoint; training may go on when this returns."""
        uuid = self._distributed.broadcast(str(uuids.uuid4()))
        self._controller.save_checkpoint(SaveCheckpoint(uuid=uuid))
        return StagedCheckpoint.now(uuid, progress, self.metrics)

    def start_upload(self, staged: StagedCheckpoint) -> None:
        """Begin to store what was staged, beside training. In test mode drop it instead."""
        if self.test_mode:
            self._controller.release_staging(ReleaseStaging(uuid=staged.uuid))
            return
        self._pending = staged, Upload(lambda: self._persist(staged.uuid))

    def settle(self) -> bool:
        """Exchange what may have happened on some rank; whether any has asked for a stop.

        Commits the upload under way if it has ended everywhere; else leaves it be.
        """
        has_ended = self._pending is not None and self._pending[1].has_ended()
        everybody = self._distributed.allgather((self._info.stop_requested, has_ended))
        self._stop_requested |= any(stop for stop, _ in everybody)
        if all(ended for _, ended in everybody):
            self.finish_upload()
        return self._stop_requested

    def finish_upload(self) -> None:
        """Wait for the upload under way, commit it, and tell the trial's callbacks.

        Raises:
            CheckpointError: it failed on some rank, or could not be committed.
        """
        if self._pending is None:
            return
        (staged, upload), self._pending = self._pending, None
        while not all(self._distributed.allgather(upload.has_ended(POLL_SECONDS))):
            pass
        files = on_every_rank(self._distributed, upload.files)
        total_bytes = on_the_first_rank(self._distributed, lambda: self._commit(staged, files))
        self._controller.release_staging(ReleaseStaging(uuid=staged.uuid))
        self.newest = staged.uuid
        self._say("checkpoint %s committed: %d bytes", staged.uuid, total_bytes)
        self.run_hook("on_checkpoint_upload_end", uuid=staged.uuid)

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

    def _fetch(self, manifest: Manifest) -> str | None:
        """Bring a checkpoint to this machine; what is wrong with it, if something is."""
        request = FetchCheckpoint(uuid=manifest.uuid, files=manifest.files)

        def fetch() -> Fetched:
            fetched = self._controller.fetch_checkpoint(request)
            if fetched.problem:
                raise StorageError(fetched.problem)
            return fetched

        everybody = on_every_rank(self._distributed, fetch)
        return next((rank.damage for rank in everybody if rank.damage), None)

    def _persist(self, uuid: str) -> list[FileEntry]:
        """Store what this rank has staged. No collective."""
        persisted = self._controller.persist_checkpoint(PersistCheckpoint(uuid=uuid))
        if persisted.problem:
            raise StorageError(persisted.problem)
        return persisted.files

    def _commit(self, staged: StagedCheckpoint, files: list[list[FileEntry]]) -> int:
        manifest = staged.manifest(
            dict(enumerate(files)),
            trial=self._info.trial,
            attempt=self._attempt,
            config=self._config,
            topology=self._built.topology,
            versions=self._built.versions,
        )
        persistently(lambda: self.store.commit(manifest))
        return manifest.total_bytes

    def _say(self, message: str, *arguments: Any) -> None:
        if self._distributed.get_rank() == 0:
            logger.info(message, *arguments)
