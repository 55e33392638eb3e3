"""checkpoint-save and checkpoint-upload: the two stages of a checkpoint.

The first takes a snapshot, and training waits for it. The second uploads the staged files and
commits the manifest, beside training.
"""

from __future__ import annotations

import uuid as uuids
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.errors import CheckpointError, SlotsError, StorageError
from trial_core.messages import (
    Done,
    PersistCheckpoint,
    Persisted,
    ReleaseStaging,
    SaveCheckpoint,
    Saved,
)
from trial_core.run.sequencer import Progress
from trial_core.text_format import plural, size
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.transfer.upload import prefix_rank, upload_files
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed
from trialflow.tasks.trial_run import TrialRun


def sweep_leftovers(run: TrialRun) -> None:
    """Delete what dead attempts at the trial have stored and never committed.

    A storage failure is a warning: the next run tries again.

    Raises:
        Superseded: another run has taken the trial over.
    """
    logger = get_run_logger()
    try:
        for swept in run.store.sweep(run.trial, run.fence):
            logger.info("deleted leftovers of a dead attempt: %s", swept)
    except StorageError as error:
        logger.warning("leftovers of dead attempts are not deleted: %s", error)


@task(
    name="checkpoint-save",
    task_run_name="checkpoint-save @{progress.batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_save(run: TrialRun, progress: Progress) -> StagedCheckpoint:
    """Stage a checkpoint on every rank. Training may continue when this returns."""
    uuid = str(uuids.uuid4())
    with run.stage("checkpoint-save", f"@{progress.batches_trained}"):
        stall_seconds = run.config.stopping.idle_timeout_seconds
        saved = run.slots.request(SaveCheckpoint(uuid=uuid), Saved, stall_seconds=stall_seconds)
    run.writes_run_files |= any(rank.writes_run_files for rank in saved)
    run.stop_requested |= any(rank.stop_requested for rank in saved)
    folders = tuple(rank.staging for rank in saved)
    return StagedCheckpoint.now(uuid, progress, run.metrics, folders)


@task(
    name="checkpoint-upload",
    task_run_name="checkpoint-upload @{staged.progress.batches_trained}",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def checkpoint_upload(run: TrialRun, staged: StagedCheckpoint) -> Manifest:
    """Upload what every rank has staged, then commit. Runs beside training.

    Raises:
        StorageError: the storage failed on a rank or here. The staged files are still there.
        CheckpointError: ranks wrote different files under one name, or a rank's files cannot be
            part of a checkpoint. A retry would not help.
        Superseded: another run has taken over the trial.
    """
    if run.topology is None:
        raise SlotsError("a checkpoint is saved only after the trial was built")
    with run.stage("checkpoint-upload", f"@{staged.progress.batches_trained}"):
        code = run.store.announce_upload(
            run.trial, staged.uuid, run.attempt, run.fence, run.code.archive
        )
        manifest = staged.manifest(
            _upload(run, staged),
            trial=run.trial,
            attempt=run.attempt,
            config=run.config,
            topology=run.topology,
            versions=run.versions,
            epoch=run.epoch,
            code=code,
        )
        run.store.commit(manifest, run.fence)
        # Before the next request: the checkpoint is committed, even if that request fails.
        run.observer.checkpoint_committed(
            manifest.uuid, manifest.progress.batches_trained, manifest.total_bytes
        )
        run.slots.request(ReleaseStaging(uuid=staged.uuid), Done)
    get_run_logger().info(
        "checkpoint %s committed: %s, %s",
        manifest.uuid, plural(len(manifest.files), "file"), size(manifest.total_bytes),
    )  # fmt: skip
    return manifest


def _upload(run: TrialRun, staged: StagedCheckpoint) -> dict[int, list[FileEntry]]:
    """Upload a staged checkpoint; return each rank's files."""
    if run.store.is_process_local:
        # Only this process sees that storage, so it uploads the files itself.
        return {
            rank: upload_files(run.store, staged.uuid, Path(folder), rank)
            for rank, folder in enumerate(staged.folders)
        }
    request = PersistCheckpoint(uuid=staged.uuid)
    persisted = run.slots.request(request, Persisted, stall_seconds=_upload_stall_seconds(run))
    for rank, result in enumerate(persisted):
        if result.problem:
            raise StorageError(prefix_rank(rank, result.problem))
        if result.mistake:
            raise CheckpointError(prefix_rank(rank, result.mistake))
    return {rank: result.files for rank, result in enumerate(persisted)}


def _upload_stall_seconds(run: TrialRun) -> float | None:
    """The stall timeout of the upload request; None: no limit.

    Each rank detects a hung persister itself, within `checkpointing.stall_timeout_seconds`. This
    timeout is longer. It detects a rank that is stopped, or that hangs outside the transfer.
    """
    silence = run.config.stopping.idle_timeout_seconds
    transfer = run.config.checkpointing.stall_timeout_seconds
    return None if silence is None or transfer is None else silence + transfer
