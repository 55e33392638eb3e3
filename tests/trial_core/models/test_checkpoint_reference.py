"""References to checkpoints by the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.manifests import commit_files
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, ModelNotFound, RegistryError
from trial_core.models.checkpoint_reference import open_checkpoint, referenced_uuid
from trial_core.models.registry import Registry


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path))


@pytest.fixture
def saved(store: CheckpointStore) -> list[Manifest]:
    """Three versions of the model gpt; 3 is champion, 1 was before."""
    manifests = [commit_files(store, batches) for batches in (7, 11, 13)]
    registry = Registry(store)
    for manifest in manifests:
        registry.register("gpt", manifest, metric=None, smaller_is_better=True, value=None)
    registry.promote("gpt", 1)
    registry.promote("gpt", 3)
    return manifests


def test_aliases_and_versions(store: CheckpointStore, saved: list[Manifest]) -> None:
    """An alias or a version of a model stands for its checkpoint; a uuid for itself."""
    first, second, third = saved
    assert open_checkpoint(store, "champion:gpt") == third
    assert open_checkpoint(store, "previous:gpt") == first
    assert open_checkpoint(store, "gpt:2") == second
    assert open_checkpoint(store, second.uuid) == second
    assert referenced_uuid(store, "0123") == "0123"


@pytest.mark.parametrize(
    ("reference", "error", "says"),
    [
        ("champion:gtp", ModelNotFound, "there is no model 'gtp' in .*; models there: bare, gpt"),
        ("champion:bare", ModelNotFound, "model bare has no champion"),
        ("previous:bare", ModelNotFound, "model bare has no previous champion"),
        ("gpt:9", ModelNotFound, "model gpt has no version 9; its last ones: 1, 2, 3"),
        ("gpt:0", ModelNotFound, "no version 0"),
        ("gpt:²", CheckpointNotFound, "expected a uuid or its first characters, champion:MODEL"),
        ("gpt:latest", CheckpointNotFound, "'gpt:latest' names no checkpoint: expected a uuid"),
        ("champion:../x", RegistryError, "not a valid model name"),
    ],
)
def test_refused_references(
    store: CheckpointStore, saved: list[Manifest], reference: str, error: type[Exception], says: str
) -> None:
    """The error says what there is, or which forms there are."""
    Registry(store).register("bare", saved[0], metric=None, smaller_is_better=True, value=None)
    with pytest.raises(error, match=says):
        referenced_uuid(store, reference)


def test_a_version_whose_checkpoint_was_deleted(
    store: CheckpointStore, saved: list[Manifest]
) -> None:
    """The error names the version."""
    store.delete(saved[1])
    with pytest.raises(CheckpointNotFound, match="of version 2 of model gpt was deleted"):
        open_checkpoint(store, "gpt:2")
