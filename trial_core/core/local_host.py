"""The host of a script without a driver: its ranks store their checkpoints themselves."""

from __future__ import annotations

import logging
import uuid as uuids
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from trial_core.checkpoint.code_objects import RunCode
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, StoredCode, Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.cluster_info import ScriptInfo
from trial_core.config import ExperimentConfig
from trial_core.config.lengths import OPEN_END
from trial_core.config.script import has_code_folder
from trial_core.context import RunInfo
from trial_core.controller.checkpoint_files import CheckpointFiles
from trial_core.controller.collective_errors import run_on_all_ranks, run_on_rank_0
from trial_core.controller.controller import library_versions
from trial_core.controller.run_file_upload import RunFileUpload, instruments_in
from trial_core.core.script_host import ScriptHost
from trial_core.core.stored_checkpoints import StoredCheckpoints
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointDamaged, ConfigError, SlotsError, StorageError
from trial_core.retention.claims import RunClaim
from trial_core.retention.pruning import prune_trial
from trial_core.retention.trial_owner import own_trial
from trial_core.run.choose_resume_point import fetch_first_intact, resume_points
from trial_core.run.observer import MetricsKind
from trial_core.run.run_dirs import locked_run_dir, prepare_run_dir, run_dir_of, trial_id
from trial_core.run.script_progress import ScriptProgress
from trial_core.slots.stop_barrier import StopBarrier
from trial_core.text_format import metrics_line
from trial_core.trainer.background_upload import retry_storage
from trial_core.trainer.fit_stop import FitStop
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.transfer.trial_code import code_of_folder

logger = logging.getLogger(__name__)

LATEST = "latest"


class LocalHost(ScriptHost):
    """`ScriptHost` without a driver. Collective: every rank constructs one.

    Args:
        stack: what it opens is closed with it.
        config: the script's experiment.
        experiment: the same, as the script has given it.
        metric: the name of the searcher metric; None: the script names none.
        latest_checkpoint, take_over: see `trial_core.init`.

    Raises:
        CheckpointNotFound: there is no `latest_checkpoint`.
        CheckpointDamaged: no checkpoint to resume from is intact.
        TrialflowError: another run trains the trial, or may do so.
    """

    def __init__(
        self,
        stack: ExitStack,
        config: ExperimentConfig,
        experiment: Mapping[str, Any],
        distributed: DistributedContext,
        metric: str | None,
        latest_checkpoint: str | None,
        take_over: bool,
    ) -> None:
        self.distributed = distributed
        self._stack = stack
        self._config = config
        storage = config.checkpoint_storage
        self._store = CheckpointStore(storage.url, storage.options)
        if self._store.is_process_local and distributed.get_size() > 1:
            raise ConfigError(
                f"checkpoint_storage: {self._store.url} is in the memory of one process, and there "
                f"are {distributed.get_size()} ranks; use a folder that all ranks see, or an "
                "object storage"
            )
        run_on_rank_0(distributed, self._store.check_writable)
        points = run_on_rank_0(distributed, lambda: self._resume_points(latest_checkpoint))
        continued = points[0].checkpoint if points[0].restore == "everything" else None
        new = distributed.broadcast(trial_id(config.name, uuids.uuid4().hex))
        self._trial = new if continued is None else continued.trial
        self._claim: RunClaim | None = None
        self._fence: Fence | None = None
        source = None if continued else points[0].uuid
        run_on_rank_0(distributed, lambda: self._own(source, take_over))
        if latest_checkpoint == LATEST:
            # Again: another attempt may have saved until this one took over.
            points = run_on_rank_0(
                distributed, lambda: resume_points(self._store, config, self._trial)
            )
        run_dir = run_dir_of(self._trial)
        # On all ranks: no other rank of the machine may fetch files into it before.
        run_on_all_ranks(distributed, self._prepare_run_dir)
        self._code: RunCode | None = None
        self._stored_code: StoredCode | None = None
        run_on_rank_0(distributed, self._pack_code)
        instruments = instruments_in(run_dir, distributed.get_rank())
        instruments.rank = distributed.get_rank()
        self._run = RunInfo(self._trial, dict(experiment), instruments=instruments)
        settings = config.checkpointing.model_dump(mode="json")
        self._files = CheckpointFiles(run_dir, self._store, distributed, settings)
        stack.callback(self._files.close)
        self._run_files = RunFileUpload(self._run, self._store, run_dir)
        start = fetch_first_intact(points, self._fetch)
        self.checkpoints = StoredCheckpoints(
            self._files, self._store, distributed, fetched=start.uuid
        )
        self._progress = ScriptProgress(
            metric, config.searcher.smaller_is_better, start.progress, start.metrics
        )
        self.info = ScriptInfo.of(self._trial, experiment, start.uuid)
        self._stop_barrier = StopBarrier()
        self._stop: FitStop | None = None
        self._must_stop = False
        self.max_length = None if (length := config.searcher.max_length) == OPEN_END else length

    def finish(self) -> None:
        """Store the remaining files for TensorBoard, after a script without an error.

        A script that was asked to stop leaves its last files on this machine: it may be resumed.
        """
        self._run.instruments.finish()
        self._run_files.upload()
        if not self._must_stop:
            self._files.clear_kept()

    # ------------------------------------------------------------------------------ the host

    def report(self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._run.instruments.report(kind, steps_completed, metrics)
        logger.info("%s metrics at %d: %s", kind, steps_completed, metrics_line(metrics))
        mistake = self._progress.reported(kind, steps_completed, metrics)
        if mistake is not None:
            logger.warning("no checkpoint counts as the best: %s", mistake)

    def set_status(self, text: str) -> None:
        logger.info("%s", text)

    def should_preempt(self) -> bool:
        if self._stop is None:
            # Not earlier: SIGTERM ends a script that never asks.
            stop = FitStop(self.distributed, self._stop_barrier)
            self._stop = self._stack.enter_context(stop)
            self._stop_barrier.begin_workload()
        self._must_stop = self._must_stop or not self._stop_barrier.may_begin_step()
        return self._must_stop

    def commit(self, uuid: str, steps_completed: int, shard: bool) -> None:
        ranks = self.distributed
        if not shard:
            self._announce(uuid)
            self._commit(uuid, steps_completed, [self._upload(uuid)])
        else:
            run_on_rank_0(ranks, lambda: self._announce(uuid))
            files = run_on_all_ranks(ranks, lambda: self._upload(uuid))
            run_on_rank_0(ranks, lambda: self._commit(uuid, steps_completed, files))
        self._files.release(uuid)

    # ----------------------------------------------------------------------------- internals

    def _resume_points(self, latest_checkpoint: str | None) -> list[ResumePoint]:
        """What the script may resume from, best first; at least one. On rank 0."""
        store, config = self._store, self._config
        if latest_checkpoint is not None and latest_checkpoint != LATEST:
            return [ResumePoint.continuing(store.open(latest_checkpoint))]
        trial = store.newest_trial(config.name) if latest_checkpoint == LATEST else None
        return resume_points(store, config, trial)

    def _own(self, source: str | None, take_over: bool) -> None:
        """Become the trial's newest attempt, until the stack closes. On rank 0."""
        self._stack.enter_context(locked_run_dir(self._trial))
        attempt = uuids.uuid4().hex
        self._claim, self._fence = self._stack.enter_context(
            own_trial(self._store, self._trial, attempt, take_over=take_over, source=source)
        )
        try:
            for swept in self._store.sweep(self._trial, self._fence):
                logger.info("deleted leftovers of a dead attempt: %s", swept)
        except StorageError as error:
            logger.warning("leftovers of dead attempts are not deleted: %s", error)

    def _prepare_run_dir(self) -> None:
        ranks = self.distributed
        if ranks.get_rank() != 0 and ranks.get_local_rank() == 0:  # rank 0 holds the folder's lock
            prepare_run_dir(self._trial)

    def _pack_code(self) -> None:
        """Pack the script's folder for its checkpoints. On rank 0."""
        if has_code_folder("__main__"):
            self._code = code_of_folder(self._config.code, self._store, logger).archive
        else:
            logger.info("checkpoints hold no code: this is a notebook or an installed command")

    def _fetch(self, point: ResumePoint) -> str | None:
        """Fetch a checkpoint to this machine. Return what is damaged. Collective."""
        manifest = point.checkpoint
        if manifest is None:
            return None

        def fetch() -> str | None:
            if self._claim is not None:  # first, so that it is not pruned meanwhile
                self._claim.renew(manifest.name)
            try:
                retry_storage(lambda: self._files.fetch(manifest.uuid, manifest.files))
            except CheckpointDamaged as damage:
                return str(damage)
            return None

        found = run_on_all_ranks(self.distributed, fetch)
        damage = next((each for each in found if each), None)
        if damage is not None and self.distributed.get_rank() == 0:
            logger.error("checkpoint %s cannot be used: %s", point.uuid, damage)
        return damage

    def _announce(self, uuid: str) -> None:
        fence = self._required_fence()
        self._stored_code = retry_storage(
            lambda: self._store.announce_upload(self._trial, uuid, fence.attempt, fence, self._code)
        )

    def _upload(self, uuid: str) -> list[FileEntry]:
        return retry_storage(lambda: self._files.persist(uuid))

    def _commit(self, uuid: str, steps_completed: int, files: list[list[FileEntry]]) -> None:
        """Commit the files of all ranks, then prune. On rank 0."""
        fence, size = self._required_fence(), self.distributed.get_size()
        at, metrics = self._progress.stored(steps_completed), self._progress.metrics
        manifest = StagedCheckpoint.now(uuid, at, metrics).manifest(
            dict(enumerate(files)),
            trial=self._trial,
            attempt=fence.attempt,
            config=self._config,
            topology=Topology(world_size=size, data_parallel_size=size),
            versions=library_versions(),
            code=self._stored_code,
        )
        retry_storage(lambda: self._store.commit(manifest, fence))
        logger.info("checkpoint %s committed: %d bytes", uuid, manifest.total_bytes)
        searcher = self._config.searcher
        policy = self._config.checkpoint_storage.retention(
            self._progress.metric, searcher.smaller_is_better
        )
        if policy is not None:
            prune_trial(self._store, policy, self._config.name, self._trial, logger)

    def _required_fence(self) -> Fence:
        if self._fence is None:
            raise SlotsError("only rank 0 commits")
        return self._fence
