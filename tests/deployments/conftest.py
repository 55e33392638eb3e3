from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments.cli.stored import UUIDS
from tests.support.deploying import client
from tests.support.manifests import FILES, new_manifest, stage
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.schedule.sequencer import Progress

__all__ = ["client", "history", "stored"]


def store_two(folder: Path) -> list[Manifest]:
    """Store two checkpoints of two trials in ``storage``; return them, oldest first."""
    store = CheckpointStore(f"file://{folder}/storage")
    manifests = []
    for uuid, batches, worst in zip(UUIDS, (7, 11), (1.0, float("nan")), strict=True):
        files = upload_files(store, uuid, stage(folder / uuid, FILES), 3)
        validation = {"val_loss": 0.25, "worst": worst}
        manifest = new_manifest(
            batches, uuid=uuid, trial=f"gpt-{batches}", files=files,
            progress=Progress(batches, validated_at=batches),
            metrics={"training": {"loss": 0.5}, "validation": validation},
        )  # fmt: skip
        store.commit(manifest)
        manifests.append(manifest)
    return manifests


@pytest.fixture
def stored(tmp_path: Path) -> list[Manifest]:
    """Two checkpoints of two trials in ``storage``, oldest first."""
    return store_two(tmp_path)


@pytest.fixture
def history(tmp_path: Path) -> list[Manifest]:
    """Four checkpoints of one trial in ``storage``, without files; the second is the best."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    manifests = [
        new_manifest(
            batches,
            uuid=f"{batches:08d}-0000-4000-8000-000000000000",
            trial="toy-1",
            experiment="toy",
            progress=Progress(batches, validated_at=batches),
            metrics={"validation": {"loss": loss}},
        )
        for batches, loss in ((7, 0.5), (11, 0.2), (13, 0.3), (17, 0.9))
    ]
    for manifest in manifests:
        store.commit(manifest)
    return manifests
