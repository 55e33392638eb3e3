"""Checkpoints, metrics and models of a storage, by names of ``determined.experimental.client``.

No server is asked. All is read from one storage: `login` chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import decode_mapping
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.pruning import delete_checkpoint
from trial_core.checkpoint.retention_policy import best_of_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download
from trial_core.cluster_info import trial_number
from trial_core.common.decoding import decode
from trial_core.common.lazy_names import lazy_names
from trial_core.common.unknown_names import SaysWhatToUse
from trial_core.config import StorageConfig
from trial_core.driver.choose_resume_point import find_trial
from trial_core.errors import CheckpointDamaged
from trial_core.models.registry import Registry
from trial_core.observe.report.history import ReportHistory


@dataclass(frozen=True)
class TrialMetrics:
    """Metrics of a trial after `steps_completed` batches."""

    trial_id: int
    steps_completed: int
    metrics: dict[str, Any]
    group: str


@dataclass(frozen=True)
class StoredCheckpoint(SaysWhatToUse):
    """A checkpoint; `manifest` says what is known of it."""

    store: CheckpointStore = field(repr=False)
    manifest: Manifest = field(repr=False)

    @property
    def uuid(self) -> str:
        return self.manifest.uuid

    @property
    def metadata(self) -> dict[str, Any]:
        """What a Core API script has stored with it. Raises CheckpointDamaged."""
        stored = self.store.read_file(self.manifest, "metadata.json") or b"{}"
        return decode_mapping(stored, f"metadata.json of checkpoint {self.uuid}")

    def download(self, path: str | None = None, mode: Any = None) -> str:
        """Fetch and verify all files into a folder, by default ``checkpoints/UUID``; returns it."""
        folder = Path(path or Path("checkpoints", self.uuid))
        download(self.store, self.uuid, folder)
        return str(folder)

    def get_metrics(self, group: str | None = None) -> list[TrialMetrics]:
        """The metrics of this very state, of one group or all."""
        number, at = trial_number(self.manifest.trial), self.manifest.progress.batches_trained
        every = self.manifest.metrics.items()
        return [TrialMetrics(number, at, each, of) for of, each in every if group in (None, of)]

    def delete(self) -> None:
        """Delete it. Refused if it is pinned or a model's version."""
        delete_checkpoint(self.store, self.manifest)


@dataclass(frozen=True)
class Trial(SaysWhatToUse):
    """A trial; `id` is the number in its id, which is `name`."""

    store: CheckpointStore = field(repr=False)
    name: str

    @property
    def id(self) -> int:
        return trial_number(self.name)

    def list_checkpoints(self, **order: Any) -> list[StoredCheckpoint]:
        """All checkpoints, oldest first, whatever `order` says."""
        return [StoredCheckpoint(self.store, each) for each in self.store.list(self.name)]

    def top_checkpoint(self, **order: Any) -> StoredCheckpoint | None:
        """The best checkpoint by ``searcher.metric``, whatever `order` says."""
        best = best_of_trial(self.store.list(self.name))
        return None if best is None else StoredCheckpoint(self.store, best)

    def iter_metrics(self, group: str) -> Iterator[TrialMetrics]:
        """The points of the report's curves, ``"training"`` or ``"validation"``, in order.

        Raises:
            CheckpointDamaged: the stored report is not readable.
        """
        key = layout.run_file_key(self.name, "report.json")
        stored = self.store.storage.read(key)
        try:
            curves: Mapping[Any, Any] = decode(stored, ReportHistory).curves if stored else {}
        except msgspec.MsgspecError as error:
            url = f"{self.store.url}/{key}"
            raise CheckpointDamaged(f"{url} is not a readable report: {error}") from None
        for point in curves.get(group, []):
            yield TrialMetrics(self.id, point.batches, point.values, group)


@dataclass(frozen=True)
class ModelVersion(SaysWhatToUse):
    """A version of a model."""

    model_name: str
    model_version: int
    checkpoint: StoredCheckpoint


@dataclass(frozen=True)
class Model(SaysWhatToUse):
    """A model of the registry."""

    store: CheckpointStore = field(repr=False)
    name: str

    def list_versions(self, **order: Any) -> list[ModelVersion]:
        """All versions, newest first, whatever `order` says."""
        versions = reversed(Registry(self.store).versions(self.name))
        opened = ((each, self.store.open(each.checkpoint)) for each in versions)
        return [
            ModelVersion(self.name, each.number, StoredCheckpoint(self.store, manifest))
            for each, manifest in opened
        ]

    def get_version(self, version: int = -1) -> ModelVersion | None:
        """A version by its number, -1: the newest; None: there is none."""
        every = self.list_versions()
        return next((each for each in every if version in (-1, each.model_version)), None)


class Determined(SaysWhatToUse):
    """The client of one storage.

    Args:
        master: a folder, a URL such as ``s3://bucket/prefix``, or a section ``checkpoint_storage``;
            by default ``./trialflow-runs/checkpoints``.
    """

    def __init__(self, master: str | Mapping[str, Any] | None = None, **ignored: Any) -> None:
        place = StorageConfig() if master is None else StorageConfig.model_validate(master)
        self.store = CheckpointStore(place.url, place.options)

    def login(self, master: str | Mapping[str, Any] | None = None, **ignored: Any) -> None:
        """Use another storage."""
        self.store = Determined(master).store

    def get_checkpoint(self, uuid: str) -> StoredCheckpoint:
        """A checkpoint by its uuid, or the first characters of it."""
        return StoredCheckpoint(self.store, self.store.open(uuid))

    def get_trial(self, trial_id: int | str) -> Trial:
        """The trial with this id or number that has stored a checkpoint."""
        return Trial(self.store, find_trial(self.store, trial_id))

    def get_model(self, identifier: str) -> Model:
        """A model by its name."""
        Registry(self.store).check_exists(identifier)
        return Model(self.store, identifier)

    def list_models(self, **order: Any) -> list[Model]:
        """All models, by name."""
        return [Model(self.store, name) for name in Registry(self.store).models()]


Checkpoint = StoredCheckpoint
_client = Determined()
login, get_checkpoint, get_trial = _client.login, _client.get_checkpoint, _client.get_trial
get_model, list_models = _client.get_model, _client.list_models

__getattr__, __dir__ = lazy_names(__name__, list(globals()), {})
