"""What a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.choose_resume_point import resume_points
from trial_core.driver.fetch_resume_point import fetch_first_intact
from trial_core.errors import CheckpointNotFound

TRIAL = "toy-0000beef"
SOURCE = new_manifest(3, trial="other-0000beef")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/checkpoints")


def saved(store: CheckpointStore, batches: int) -> Manifest:
    manifest = new_manifest(batches, trial=TRIAL)
    store.commit(manifest)
    return manifest


def test_a_trial_resumes_from_its_own_checkpoints_newest_first(
    tmp_path: Path, store: CheckpointStore
) -> None:
    """Its source checkpoint counts only as long as the trial has saved nothing."""
    store.commit(SOURCE)
    searcher = {
        "metric": "loss",
        "max_length": {"batches": 9},
        "source_checkpoint_uuid": SOURCE.uuid,
    }
    config = toy_config(tmp_path, searcher=searcher)
    source = ResumePoint.warm(SOURCE, weights_only=False)
    assert [*resume_points(store, config, TRIAL)] == [source]
    older, newer = saved(store, 4), saved(store, 8)
    assert [point.uuid for point in resume_points(store, config, TRIAL)] == [newer.uuid, older.uuid]


def test_a_restart_reads_the_newest_manifest_only(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many checkpoints the trial has; older ones are read if it is damaged."""
    manifests = [saved(store, batches) for batches in range(1, 9)]
    reads: list[str] = []
    read = store.storage.read
    monkeypatch.setattr(store.storage, "read", lambda key: reads.append(key) or read(key))
    points = resume_points(store, toy_config(tmp_path), TRIAL)
    assert next(points).checkpoint == manifests[-1]
    assert reads == [manifests[-1].name.key]
    assert [point.checkpoint for point in points] == manifests[-2::-1]


@pytest.mark.parametrize("source_trial_id", [0x2A, "other-0000002a"])
def test_a_source_trial_gives_its_newest_checkpoint(
    tmp_path: Path, store: CheckpointStore, source_trial_id: int | str
) -> None:
    """Older ones follow, in case that it is damaged. The trial is named by number or by id."""
    older, newer = (new_manifest(batches, trial="other-0000002a") for batches in (3, 7))
    for manifest in (newer, older, new_manifest(9, trial="another-0000003b")):
        store.commit(manifest)
    searcher = {"metric": "loss", "max_length": {"batches": 9}, "source_trial_id": source_trial_id}
    config = toy_config(tmp_path, searcher={**searcher, "source_weights_only": True})
    assert [*resume_points(store, config, TRIAL)] == [
        ResumePoint.warm(newer, weights_only=True), ResumePoint.warm(older, weights_only=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source_trial_id", "message"),
    [
        (7, r"no trial has the id or number 7 in .*; there: a-0000002a \(42\), b-0000002a \(42\)"),
        (42, r"2 trials have the number 42 in .*; there: a-0000002a \(42\), b-0000002a \(42\)"),
    ],
)
def test_an_unknown_source_trial_is_named(
    tmp_path: Path, store: CheckpointStore, source_trial_id: int, message: str
) -> None:
    """The error has the numbers that there are: Determined's own are others."""
    for trial in ("a-0000002a", "b-0000002a"):
        store.commit(new_manifest(3, trial=trial))
    searcher = {"metric": "loss", "max_length": {"batches": 9}, "source_trial_id": source_trial_id}
    with pytest.raises(CheckpointNotFound, match=message):
        resume_points(store, toy_config(tmp_path, searcher=searcher), None)


@pytest.mark.parametrize("trial", [TRIAL, None])
def test_a_trial_without_checkpoints_begins_with_nothing(
    tmp_path: Path, store: CheckpointStore, trial: str | None
) -> None:
    """Its resume point has no checkpoint, and nothing is fetched."""
    points = resume_points(store, toy_config(tmp_path), trial)
    assert fetch_first_intact(points, pytest.fail) == ResumePoint()
