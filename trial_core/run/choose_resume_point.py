"""What a run resumes from: the choice of resume points, and fetching the first intact one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trial_core.checkpoint.resume_point import ResumePoint, no_intact_checkpoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointNotFound

_logger = logging.getLogger(__name__)


def resume_points(
    store: CheckpointStore, config: ExperimentConfig, trial: str | None
) -> list[ResumePoint]:
    """What a run of `trial` may resume from, best first; at least one.

    The trial's own checkpoints. If it has none: the experiment's source checkpoint, or nothing.

    Args:
        trial: None: a new trial.

    Raises:
        CheckpointNotFound: the storage does not have the source checkpoint.
    """
    own = [] if trial is None else store.resume_candidates(trial)
    source = config.searcher.source_checkpoint_uuid
    if own:
        return [ResumePoint.continuing(manifest) for manifest in own]
    if source is not None:
        return [ResumePoint.warm(store.open(source), config.searcher.source_weights_only)]
    return [ResumePoint()]


def fetch_first_intact(
    points: Iterable[ResumePoint], fetch: Callable[[ResumePoint], str | None]
) -> ResumePoint:
    """Fetch the first of `points` that is neither damaged nor deleted meanwhile.

    Args:
        fetch: fetches a point's checkpoint, and returns what is damaged; None if intact.

    Raises:
        CheckpointDamaged: all checkpoints are damaged or deleted.
        StorageError: the storage failed. The checkpoint may be intact, so no older one is used.
    """
    tried: list[ResumePoint] = []
    damage = None
    for point in points:
        if point.checkpoint is None:
            return point
        try:
            damage = fetch(point)
        except CheckpointNotFound as error:  # deleted since the points were listed
            _logger.warning("the run resumes from an older checkpoint, if there is one: %s", error)
            damage = str(error)
        if damage is None:
            return point
        tried.append(point)
    raise no_intact_checkpoint(tried, str(damage))
