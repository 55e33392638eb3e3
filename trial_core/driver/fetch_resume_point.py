"""Fetches the checkpoint that a run resumes from: the first intact one of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trial_core.checkpoint.resume_point import ResumePoint, no_intact_checkpoint
from trial_core.driver.run import Launch
from trial_core.driver.stages.build import fetch_checkpoint
from trial_core.errors import CheckpointNotFound

_logger = logging.getLogger(__name__)


def fetch_first_intact(
    points: Iterable[ResumePoint],
    fetch: Callable[[ResumePoint], str | None],
    tell: Callable[[str], None] = _logger.warning,
) -> ResumePoint:
    """Fetch the first of `points` that is neither damaged nor deleted in the meantime.

    Args:
        fetch: fetches a point's checkpoint, and describes the damage; None if intact.
        tell: called with what a person has to know if a point could not be used.

    Raises:
        CheckpointDamaged: all checkpoints are damaged or deleted.
        StorageError: the storage failed. The checkpoint may be intact, so an older one is not used.
    """
    tried: list[ResumePoint] = []
    unusable: list[str] = []
    damage = None
    for point in points:
        try:
            damage = None if point.checkpoint is None else fetch(point)
        except CheckpointNotFound as error:  # deleted since the points were listed
            damage = str(error)
        if damage is None:
            if unusable:
                start = f", checkpoint {point.uuid}" if point.checkpoint is not None else ""
                begin = point.progress.batches_trained
                tell(f"training continues from batch {begin}{start}: {'; '.join(unusable)}")
            return point
        tried.append(point)
        at = point.progress.batches_trained
        unusable.append(f"checkpoint {point.uuid} at batch {at} cannot be used: {damage}")
    raise no_intact_checkpoint(tried, str(damage))


def require_convertible(launch: Launch, point: ResumePoint) -> None:
    """Raise TopologyMismatch if the ranks cannot restore a resume point's checkpoint."""
    if launch.answers.topology is not None:
        point.require_convertible(launch.answers.topology)


def fetch(launch: Launch, point: ResumePoint) -> str | None:
    """Fetch a resume point's checkpoint to the ranks. Describe the damage; None if intact.

    Raises StorageError if the storage failed.
    """
    if point.checkpoint is None:
        return None
    if launch.run.claim is not None:  # first, so that it is not pruned meanwhile
        launch.run.claim.renew(point.checkpoint.name)
    return fetch_checkpoint(launch, point.checkpoint, point.restore)
