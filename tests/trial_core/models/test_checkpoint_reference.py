"""References to checkpoints by the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import LONG_AGO, commit_files
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointError,
    CheckpointNotFound,
    ModelNotFound,
    RegistryError,
)
from trial_core.models.checkpoint_reference import open_checkpoint, referenced_uuid
from trial_core.models.registry import Registry
from trial_core.schedule.sequencer import Progress


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
        (
            "gpt:²",
            CheckpointNotFound,
            "expected a uuid or its first characters, best, latest, best:T",
        ),
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


BY_LOSS = {"searcher": {"metric": "loss", "smaller_is_better": True}}
BY_ACCURACY = {"searcher": {"metric": "accuracy", "smaller_is_better": False}}


def commit_validated(
    store: CheckpointStore, batches: int, config: dict[str, Any], **fields: Any
) -> Manifest:
    """A checkpoint at `batches` whose validation improves at batch 11 and is lost at 13."""
    loss = {7: 0.5, 11: 0.25, 13: 0.75, 17: float("nan")}[batches]
    return commit_files(
        store, batches, config=config, progress=Progress(batches, validated_at=batches),
        metrics={"validation": {"loss": loss, "accuracy": 1 - loss}}, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("config", [BY_LOSS, BY_ACCURACY])
def test_the_best_and_the_latest_of_a_trial(tmp_path: Path, config: dict[str, Any]) -> None:
    """By the searcher metric and its direction; of the experiment's newest trial, or a named one.

    A trial of another experiment that has saved later is not meant.
    """
    store = CheckpointStore(str(tmp_path), experiment="gpt")
    older = commit_validated(store, 13, config, trial="gpt-1", created_at=LONG_AGO)
    own = [commit_validated(store, batches, config, trial="gpt-2") for batches in (7, 11, 13, 17)]
    commit_validated(
        store, 7, config, trial="other-1", experiment="other",
        created_at="2032-05-09T17:04:00.000000Z",
    )  # fmt: skip
    assert open_checkpoint(store, "best") == own[1]
    assert open_checkpoint(store, "latest").uuid == own[3].uuid
    with pytest.raises(CheckpointNotFound, match=r"of which experiment: .*: gpt, other$"):
        referenced_uuid(CheckpointStore(str(tmp_path)), "best")
    store.delete(store.list("other-1")[0])
    assert open_checkpoint(CheckpointStore(str(tmp_path)), "best") == own[1]
    assert referenced_uuid(store, "best:gpt-1") == older.uuid
    assert referenced_uuid(store, "latest:gpt-1") == older.uuid
    # The direction that counts is that of the trial's last run.
    turned = {"searcher": {**config["searcher"], "smaller_is_better": config is BY_ACCURACY}}
    commit_files(store, 19, config=turned, trial="gpt-2")
    assert open_checkpoint(store, "best") == own[2]


@pytest.mark.parametrize(
    ("experiment", "reference", "says"),
    [
        ("gtp", "latest", "'latest': no checkpoint in file://.* is of experiment 'gtp'"),
        ("gpt", "best:gpt-9", "trial 'gpt-9' has no checkpoint in file://"),
        ("gpt", "latest:gpt-9", "trial 'gpt-9' has no checkpoint in file://"),
        ("gpt", "best", "no checkpoint of trial gpt-0123abcd is its best: none .*latest:gpt-0123"),
        ("gpt", "best:", "'' cannot be a trial's id"),  # not the newest one: an unset variable
        ("gpt", "best:../x", "'../x' cannot be a trial's id"),
    ],
)
def test_no_best_or_latest(tmp_path: Path, experiment: str, reference: str, says: str) -> None:
    """The error says what to name instead."""
    commit_files(CheckpointStore(str(tmp_path)), 7)  # not validated, and of an earlier version
    store = CheckpointStore(str(tmp_path), experiment=experiment)
    with pytest.raises(CheckpointError, match=says):
        referenced_uuid(store, reference)
