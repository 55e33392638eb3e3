"""checkpoint-save, checkpoint-upload and checkpoint-prune: the stages of a checkpoint.

The first takes a snapshot, and training waits for it. In parallel with training, the second
uploads the staged files and commits the manifest, and the third deletes checkpoints.
"""

from __future__ import annotations

import uuid as uuids
from pathlib import Path

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.retention.pruning import prune_trial
from trial_core.checkpoint.retention.shared_files import announce_shared_upload
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.checkpoint.transfer.upload import (
    StagedCheckpoint,
    merge_entries,
    prefix_rank,
    upload_files,
)
from trial_core.common.any_logger import AnyLogger
from trial_core.common.text_format import plural, size
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import parallel_stage, stage
from trial_core.errors import CheckpointRefused, SlotsError, StorageError, WeightsChanged
from trial_core.messages import (
    Done,
    PersistCheckpoint,
    Persisted,
    ReleaseStaging,
    SaveCheckpoint,
    Saved,
)
from trial_core.schedule.sequencer import Progress


def sweep_leftovers(
    store: CheckpointStore, trial: str, fence: Fence, logger: AnyLogger, of: str = "a dead attempt"
) -> None:
    """Delete the uncommitted files of dead attempts at the trial. The log names them with `of`.

    A storage failure is a warning: the next run tries again. Raises Superseded if another run has
    taken the trial over.
    """
    try:
        for swept in store.sweep(trial, fence):
            logger.info("deleted leftovers of %s: %s", of, swept)
    except StorageError as error:
        logger.warning("leftovers of dead attempts are not deleted: %s", error)


@stage("checkpoint-save", "@{progress.batches_trained}", bucket="checkpoint_stall")
def checkpoint_save(launch: Launch, progress: Progress) -> StagedCheckpoint:
    """Stage a checkpoint on every rank. Training may continue when this returns."""
    uuid, answers = str(uuids.uuid4()), launch.answers
    saved = launch.ask(SaveCheckpoint(uuid=uuid), Saved)
    answers.writes_run_files |= any(rank.writes_run_files for rank in saved)
    launch.note_stop_requests(saved)
    folders = tuple(rank.staging for rank in saved)
    return StagedCheckpoint.now(uuid, progress, answers.metrics, folders)


@parallel_stage("checkpoint-upload", "@{staged.progress.batches_trained}", is_transfer=True)
def checkpoint_upload(launch: Launch, staged: StagedCheckpoint) -> Manifest:
    """Upload the files that the ranks have staged, then commit. Runs in parallel with training.

    Raises:
        StorageError: the storage failed on a rank or here. The staged files are kept.
        CheckpointRefused: ranks wrote different files under one name, or a rank's files cannot be
            part of a checkpoint. A retry would not help; after WeightsChanged, another save does.
        Superseded: another run has taken over the trial.
    """
    run, answers = launch.run, launch.answers
    if answers.topology is None:
        raise SlotsError("a checkpoint is saved only after the trial was built")
    base, shared = announce_shared_upload(
        run.store, run.trial, staged.uuid, launch.id, run.fence, run.logger
    )
    code = upload_code(run.store, staged.uuid, launch.code.archive, shared)
    manifest = Manifest(
        uuid=staged.uuid,
        trial=run.trial,
        experiment=run.config.name,
        writer=launch.id,
        created_at=staged.saved_at,
        progress=staged.progress,
        metrics=staged.metrics,
        topology=answers.topology,
        versions=answers.versions,
        config_digest=run.config.digest(),
        files=merge_entries(_upload(launch, staged, shared)),
        entrypoint=run.config.entrypoint,
        hyperparameters=run.config.hyperparameters,
        epoch=answers.epoch,
        code=code,
        config=run.config.digested(),
        environment_digest=run.config.environment_digest(run.trial),
        changes=answers.all_changes,
    )
    run.store.commit(manifest, run.fence, base)
    run.stored_checkpoints += 1
    # Before the next request: the checkpoint is committed, even if that request fails.
    run.observer.checkpoint_committed(
        manifest.uuid, manifest.progress.batches_trained, manifest.total_bytes, manifest.digest
    )
    launch.ask(ReleaseStaging(uuid=staged.uuid), Done, stall_seconds=None)
    run.logger.info(
        "checkpoint %s committed: %s, %s, of which %s are new",
        manifest.uuid, plural(len(manifest.all_files), "file"), size(manifest.total_bytes),
        size(manifest.own_bytes),
    )  # fmt: skip
    return manifest


@parallel_stage("checkpoint-prune", "@{batches_trained}", is_timed=False)
def checkpoint_prune(launch: Launch, policy: RetentionPolicy, batches_trained: int) -> None:
    """Delete the checkpoints of the run's trial that its experiment does not keep."""
    run = launch.run
    prune_trial(
        run.store, policy, run.config.name, run.trial, run.logger, run.observer.checkpoint_deleted
    )


def _upload(
    launch: Launch, staged: StagedCheckpoint, shared: list[FileEntry]
) -> dict[int, list[FileEntry]]:
    """Upload a staged checkpoint; return each rank's files."""
    if launch.run.store.is_process_local:
        # Only this process sees that storage, so it uploads the files itself.
        return {
            rank: upload_files(launch.run.store, staged.uuid, Path(folder), rank, shared=shared)
            for rank, folder in enumerate(staged.folders)
        }
    request = PersistCheckpoint(uuid=staged.uuid, shared=shared)
    persisted = launch.ask(request, Persisted, _upload_stall_seconds(launch))
    for rank, result in enumerate(persisted):
        if result.problem:
            raise StorageError(prefix_rank(rank, result.problem))
        if result.mistake:
            launch.has_refused = result.has_changed
            kind = WeightsChanged if result.has_changed else CheckpointRefused
            raise kind(prefix_rank(rank, result.mistake))
    return {rank: result.files for rank, result in enumerate(persisted)}


def _upload_stall_seconds(launch: Launch) -> float | None:
    """The stall timeout of the upload request; None for no limit.

    Each rank detects a hung persister itself, within `checkpointing.stall_timeout_seconds`. This
    longer timeout detects a rank that is stopped, or that hangs outside the transfer.
    """
    silence = launch.run.config.stopping.idle_timeout_seconds
    transfer = launch.run.config.checkpointing.stall_timeout_seconds
    return None if silence is None or transfer is None else silence + transfer
