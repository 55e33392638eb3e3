"""What a run may start from, as far as the driver knows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.errors import CheckpointError


def topology(ranks: int, **changes: Any) -> Topology:
    fields = {"data_parallel_size": ranks, "zero_stage": 1, "batch_samples": 8, **changes}
    return Topology(world_size=ranks, **fields)


SAVED = new_manifest(topology=topology(2))
PIPELINE = new_manifest(topology=topology(4, data_parallel_size=2, pipeline_parallel_size=2))


@pytest.mark.parametrize(
    "now", [topology(2), topology(4), topology(1, zero_stage=3), topology(2, zero_stage=0)]
)
def test_other_ranks_and_stages_can_restore(now: Topology) -> None:
    """A checkpoint is not bound to the ranks that saved it."""
    ResumePoint.continuing(SAVED).require_convertible(now)


def test_as_many_copies_of_a_divided_model_as_one_likes() -> None:
    """A pipeline's stages stay; there may be more or fewer pipelines."""
    ResumePoint.continuing(PIPELINE).require_convertible(
        topology(6, data_parallel_size=3, pipeline_parallel_size=2)
    )


def test_other_stages_are_refused() -> None:
    """How a model is divided is not ours to change."""
    said = (
        r"saved by 4 slots with 2 pipeline stage\(s\) x 1 model-parallel rank\(s\) a model, and "
        r"this run has 4 with 4 pipeline"
    )
    now = topology(4, data_parallel_size=1, pipeline_parallel_size=4)
    with pytest.raises(CheckpointError, match=said):
        ResumePoint.continuing(PIPELINE).require_convertible(now)


def test_batches_of_another_size_are_refused_on_other_ranks() -> None:
    """All that is counted in batches would mean something else; what to set is said."""
    said = (
        "saved by 2 slots in batches of 8 samples, and this run's batches have 16 on 4 slots.*"
        "train_batch_size=8 .* or with 2 slots"
    )
    with pytest.raises(CheckpointError, match=said):
        ResumePoint.continuing(SAVED).require_convertible(topology(4, batch_samples=16))


@pytest.mark.parametrize(
    "start",
    [
        ResumePoint.warm(SAVED, weights_only=False),
        ResumePoint.warm(SAVED, weights_only=True),
        ResumePoint(),
    ],
)
def test_a_new_trial_may_have_other_batches(start: ResumePoint) -> None:
    """It counts from 0."""
    start.require_convertible(topology(4, batch_samples=16))


def test_as_many_ranks_may_have_other_batches() -> None:
    """Files are used as they are; whoever changes the size alone means to."""
    ResumePoint.continuing(SAVED).require_convertible(topology(2, batch_samples=16))


def test_checkpoints_of_earlier_releases_do_not_tell_how_large_batches_were() -> None:
    """They are taken to have been alike."""
    ResumePoint.continuing(new_manifest(topology=topology(2, batch_samples=0))).require_convertible(
        topology(4, batch_samples=16)
    )


def test_weights_alone_are_offered_to_a_new_trial() -> None:
    """Where its whole state cannot be taken over."""
    now = topology(4, data_parallel_size=1, pipeline_parallel_size=4)
    with pytest.raises(CheckpointError, match="source_weights_only=true"):
        ResumePoint.warm(PIPELINE, weights_only=False).require_convertible(now)
