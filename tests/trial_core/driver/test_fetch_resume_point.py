"""Fetching the first intact checkpoint."""

from __future__ import annotations

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.driver.fetch_resume_point import fetch_first_intact
from trial_core.errors import CheckpointDamaged, CheckpointNotFound

TRIAL = "toy-0000beef"
SOURCE = new_manifest(3, trial="other-0000beef")


def test_a_damaged_checkpoint_gives_way_to_the_next() -> None:
    """The newest checkpoint is damaged: the run resumes from the one before it, and says so."""
    newer, older = (ResumePoint.continuing(new_manifest(batches)) for batches in (8, 4))
    damage = {newer.uuid: "it lacks a file"}
    told: list[str] = []
    points = [newer, older]
    assert fetch_first_intact(points, lambda point: damage.get(point.uuid), told.append) == older
    (text,) = told
    assert f"from batch 4, checkpoint {older.uuid}" in text
    assert f"checkpoint {newer.uuid} at batch 8 cannot be used: it lacks a file" in text


def test_a_deleted_checkpoint_gives_way_to_the_next() -> None:
    """A prune has deleted it since the resume points were listed. No older one: the run fails."""
    newer, older = (ResumePoint.continuing(new_manifest(batches)) for batches in (8, 4))

    def fetch(point: ResumePoint) -> None:
        if point is newer:
            raise CheckpointNotFound("it has just been deleted")

    told: list[str] = []
    assert fetch_first_intact([newer, older], fetch, told.append) == older
    assert "it has just been deleted" in told[0]
    with pytest.raises(CheckpointDamaged, match="it has just been deleted"):
        fetch_first_intact([newer], fetch)


def test_a_trial_whose_checkpoints_are_all_damaged_does_not_begin_again() -> None:
    """The error says how many were tried, and what is wrong with the last one."""
    manifests = [new_manifest(batches, trial=TRIAL) for batches in (8, 4)]
    points = [ResumePoint.continuing(manifest) for manifest in manifests]
    with pytest.raises(CheckpointDamaged) as refusal:
        fetch_first_intact(points, lambda point: f"{point.uuid} lacks a file")
    for part in ("2 checkpoint(s)", TRIAL, f"{points[-1].uuid} lacks a file"):
        assert part in str(refusal.value)


def test_a_damaged_source_checkpoint_is_named_as_such() -> None:
    """The error says that the experiment names it."""
    with pytest.raises(
        CheckpointDamaged, match=r"^the source checkpoint of the searcher: it lacks"
    ):
        fetch_first_intact([ResumePoint.warm(SOURCE, True)], lambda _: "it lacks a file")
