"""A checkpoint on its way: staged by every rank, not committed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology, utc_now
from trial_core.config import ExperimentConfig
from trial_core.run.sequencer import Progress
from trial_core.transfer.files import merge_entries
from trial_core.units import EpochLength


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has staged, and what its manifest will say.

    Attributes:
        uuid: its id.
        saved_at: when it was staged. Not when it is stored: to try that again must lead to the
            very same manifest.
        progress: how far the run had come, this checkpoint included.
        metrics: the last ones of each kind.
        folders: where each rank has staged its files, where the driver must know that.
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
        """What has just been staged, at `progress`."""
        kept = {kind: dict(values) for kind, values in metrics.items()}
        return cls(uuid, utc_now(), progress.after_checkpoint(), kept, folders)

    def manifest(
        self,
        files: Mapping[int, Iterable[FileEntry]],
        *,
        trial: str,
        attempt: str,
        config: ExperimentConfig,
        topology: Topology,
        versions: dict[str, str],
        epoch: EpochLength | None = None,
    ) -> Manifest:
        """The manifest to commit, once every rank has stored its `files`.

        Args:
            attempt: id of the writer.
            topology, versions, epoch: what the ranks said of themselves.

        Raises:
            CheckpointError: several ranks wrote different files under one name.
        """
        return Manifest(
            uuid=self.uuid,
            trial=trial,
            experiment=config.name,
            attempt=attempt,
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
        )
