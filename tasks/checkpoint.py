"""checkpoint-save and checkpoint-upload: a checkpoint's two halves.

The first copies the state out of training's way and blocks it; the second stores what was staged
and commits the manifest, while training goes on.
"""

from __future__ import annotations

import uuid as uuids
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.run import TrialRun
from trial_core.checkpoint.manifest import FileEntry, Manifest, utc_now
from trial_core.checkpoint.transfer import merge_entries, upload_files
from trial_core.errors import SlotsError
from trial_core.messages import (
    Done,
    PersistCheckpoint,
    Persisted,
    ReleaseStaging,
    SaveCheckpoint,
    Saved,
)
from trial_core.sequencer import Progress

UPLOAD_RETRIES = 2
UPLOAD_RETRY_SECONDS = 5


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has staged, and what its manifest will say."""

    uuid: str
    saved_at: str
    progress: Progress
    metrics: dict[str, dict[str, object]]
    folders: tuple[str, ...]


@task(
    name="checkpoint-save",
    task_run_name="checkpoint-save @{progress.batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_save(run: TrialRun, progress: Progress) -> StagedCheckpoint:
    """Stage a checkpoint on every rank; training may go on when this returns."""
    uuid = str(uuids.uuid4())
    with run.stage("checkpoint-save", f"@{progress.batches_trained}"):
        saved = run.slots.request(SaveCheckpoint(uuid=uuid), Saved)
    run.writes_run_files |= any(rank.writes_run_files for rank in saved)
    return StagedCheckpoint(
        uuid=uuid,
        saved_at=utc_now(),
        progress=progress.after_checkpoint(),
        metrics={kind: dict(metrics) for kind, metrics in run.metrics.items()},
        folders=tuple(rank.staging for rank in saved),
    )


@task(
    name="checkpoint-upload",
    task_run_name="checkpoint-upload @{staged.progress.batches_trained}",
    cache_policy=NO_CACHE,
    retries=UPLOAD_RETRIES,
    retry_delay_seconds=UPLOAD_RETRY_SECONDS,
    retry_condition_fn=lambda task, task_run, state: not _slots_are_gone(state),
)
def checkpoint_upload(run: TrialRun, staged: StagedCheckpoint) -> Manifest:
    """Store what every rank has staged, then commit. Runs beside training."""
    with run.stage("checkpoint-upload", f"@{staged.progress.batches_trained}"):
        files = _upload(run, staged)
        manifest = _manifest(run, staged, files)
        run.store.commit(manifest)
        # Told at once: what is committed stays so, even if its ranks are lost in the next moment.
        run.observer.checkpoint_committed(
            manifest.uuid, manifest.progress.batches_trained, manifest.total_bytes
        )
        run.slots.request(ReleaseStaging(uuid=staged.uuid), Done)
    get_run_logger().info(
        "checkpoint %s committed: %d files, %d bytes",
        manifest.uuid,
        len(manifest.files),
        manifest.total_bytes,
    )
    return manifest


def _upload(run: TrialRun, staged: StagedCheckpoint) -> list[FileEntry]:
    if run.store.is_process_local:
        # Only this process can see that storage, so it moves the bytes itself.
        return merge_entries(
            {
                rank: upload_files(run.store, staged.uuid, Path(folder), rank)
                for rank, folder in enumerate(staged.folders)
            }
        )
    persisted = run.slots.request(PersistCheckpoint(uuid=staged.uuid), Persisted)
    return merge_entries({rank: result.files for rank, result in enumerate(persisted)})


def _manifest(run: TrialRun, staged: StagedCheckpoint, files: list[FileEntry]) -> Manifest:
    if run.topology is None:
        raise SlotsError("a checkpoint is saved only after the trial was built")
    return Manifest(
        uuid=staged.uuid,
        trial=run.trial,
        experiment=run.config.name,
        attempt=run.attempt,
        # Not the time of this upload: a retry must commit the very same manifest.
        created_at=staged.saved_at,
        progress=staged.progress,
        metrics=staged.metrics,
        topology=run.topology,
        versions=run.versions,
        config_digest=run.config.digest(),
        files=files,
        entrypoint=run.config.entrypoint,
        hyperparameters=run.config.hyperparameters,
    )


def _slots_are_gone(state: object) -> bool:
    """Whether the upload failed because its ranks did: trying again cannot help."""
    return isinstance(getattr(state, "data", None), SlotsError)
