"""Which topologies can restore a checkpoint, as far as the driver knows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.errors import CheckpointError
from trial_core.schedule.sequencer import Progress


def topology(ranks: int, **changes: Any) -> Topology:
    fields = {"data_parallel_size": ranks, "zero_stage": 1, "batch_samples": 8, **changes}
    return Topology(world_size=ranks, **fields)


SAVED = new_manifest(topology=topology(2))
PIPELINE = new_manifest(topology=topology(4, data_parallel_size=2, pipeline_parallel_size=2))
OLD = new_manifest(topology=topology(2, batch_samples=0))


@pytest.mark.parametrize(
    ("start", "now"),
    [
        (ResumePoint.continuing(SAVED), topology(2)),
        (ResumePoint.continuing(SAVED), topology(4)),
        (ResumePoint.continuing(SAVED), topology(1, zero_stage=3)),
        (ResumePoint.continuing(SAVED), topology(2, zero_stage=0)),
        # No file has to be converted, so the change of the batch size is meant.
        (ResumePoint.continuing(SAVED), topology(2, batch_samples=16)),
        # Old checkpoints do not say their batch size; it is presumed to be the same.
        (ResumePoint.continuing(OLD), topology(4, batch_samples=16)),
        (
            ResumePoint.continuing(PIPELINE),
            topology(6, data_parallel_size=3, pipeline_parallel_size=2),
        ),
        # Sequence parallelism divides no model.
        (
            ResumePoint.continuing(SAVED),
            topology(2, data_parallel_size=1, sequence_parallel_size=2),
        ),
        # A new trial counts its batches from 0.
        (ResumePoint.warm(SAVED, weights_only=False), topology(4, batch_samples=16)),
        (ResumePoint.warm(SAVED, weights_only=True), topology(4, batch_samples=16)),
        (ResumePoint(), topology(4, batch_samples=16)),
    ],
)
def test_these_can_be_restored(start: ResumePoint, now: Topology) -> None:
    """Other numbers of data-parallel ranks and other ZeRO stages are converted."""
    start.require_convertible(now)


def test_other_pipeline_stages_are_refused() -> None:
    """The error says how both topologies divide the model."""
    said = (
        r"saved by 4 slots with 2 pipeline stage\(s\) x 1 model-parallel rank\(s\) a model, and "
        r"this run has 4 with 4 pipeline"
    )
    now = topology(4, data_parallel_size=1, pipeline_parallel_size=4)
    with pytest.raises(CheckpointError, match=said):
        ResumePoint.continuing(PIPELINE).require_convertible(now)


def test_other_model_parallel_parts_are_refused() -> None:
    """So it is with AutoTP on another number of slots."""
    now = topology(2, data_parallel_size=1, model_parallel_size=2)
    with pytest.raises(CheckpointError, match=r"x 1 model.*x 2 model-parallel rank\(s\) a model"):
        ResumePoint.continuing(SAVED).require_convertible(now)


def test_another_batch_size_on_other_ranks_is_refused() -> None:
    """The error says both batch sizes, and which settings can resume."""
    said = (
        "saved by 2 slots in batches of 8 samples, and this run's batches have 16 on 4 slots.*"
        "train_batch_size=8 .* or with 2 slots"
    )
    with pytest.raises(CheckpointError, match=said):
        ResumePoint.continuing(SAVED).require_convertible(topology(4, batch_samples=16))


def test_samples_are_counted_on_in_batches_of_another_size() -> None:
    """60 batches of 8 are as many when the size has changed, or is not known any more."""
    start = ResumePoint.continuing(new_manifest(60, topology=topology(2)))
    counted = {size: start.at_batches_of(size).extra_samples + 60 * size for size in (0, 8, 16)}
    assert set(counted.values()) == {480}
    assert ResumePoint().at_batches_of(16).extra_samples == 0


def test_a_refused_warm_start_may_restore_only_weights() -> None:
    """The error names the setting."""
    now = topology(4, data_parallel_size=1, pipeline_parallel_size=4)
    with pytest.raises(CheckpointError, match="source_weights_only=true"):
        ResumePoint.warm(PIPELINE, weights_only=False).require_convertible(now)


def test_a_resumed_run_knows_the_last_validation() -> None:
    """Also if it was of an earlier batch than the checkpoint. A warm start knows none."""
    latest = {"training": {"loss": 0.9}, "validation": {"loss": 0.1}}
    saved = new_manifest(60, progress=Progress(60, validated_at=40), metrics=latest)
    assert ResumePoint.continuing(saved).metrics == latest
    assert ResumePoint.warm(saved, weights_only=True).metrics == {}
