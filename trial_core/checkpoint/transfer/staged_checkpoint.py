"""A checkpoint that every rank has staged and that is not committed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology, utc_now
from trial_core.checkpoint.transfer.upload import merge_entries
from trial_core.config import ExperimentConfig
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.units import EpochLength


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has staged.

    Attributes:
        saved_at: when it was staged; a retry of the upload must give the same manifest.
        progress: the run's progress, this checkpoint included.
        metrics: the last metrics of each kind.
        folders: each rank's staging folder, if the driver uploads the files.
    """

    uuid: str
    saved_at: str
    progress: Progress
    metrics: dict[str, dict[str, Any]]
    folders: tuple[str, ...] = ()

    @classmethod
    def now(
        cls,
        uuid: str,
        progress: Progress,
        metrics: Mapping[str, Mapping[str, Any]],
        folders: tuple[str, ...] = (),
    ) -> StagedCheckpoint:
        """A checkpoint that was staged just now, at `progress`."""
        kept = {kind: dict(values) for kind, values in metrics.items()}
        return cls(uuid, utc_now(), progress.after_checkpoint(), kept, folders)

    def manifest(
        self,
        files: Mapping[int, Iterable[FileEntry]],
        *,
        trial: str,
        writer: str,
        config: ExperimentConfig,
        topology: Topology,
        versions: dict[str, str],
        epoch: EpochLength | None = None,
        code: FileEntry | None = None,
    ) -> Manifest:
        """The manifest to commit after every rank has stored its `files`.

        Args:
            writer: id of the launch that saves it.
            topology, versions, epoch: as reported by the ranks.
            code: the result of `upload_code`.

        Raises:
            CheckpointError: several ranks wrote different files under one name.
        """
        return Manifest(
            uuid=self.uuid,
            trial=trial,
            experiment=config.name,
            writer=writer,
            created_at=self.saved_at,
            progress=self.progress,
            metrics=self.metrics,
            topology=topology,
            versions=versions,
            config_digest=config.digest(),
            files=merge_entries(files),
            entrypoint=config.entrypoint,
            hyperparameters=config.hyperparameters,
            epoch=epoch,
            code=code,
            config=config.digested(),
        )
