"""Chooses the checkpoints that a run may resume from; `fetch_resume_point` fetches one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.import_checkpoint import import_checkpoint
from trial_core.common.text_format import trial_number
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointNotFound


def resume_points(
    store: CheckpointStore, config: ExperimentConfig, trial: str | None
) -> Iterator[ResumePoint]:
    """Return the possible resume points of a run of `trial`, best first; at least one.

    They are the trial's checkpoints; without any, or for a new trial (None), the source checkpoint,
    or a start from nothing. Raises CheckpointNotFound if the storage does not have the source
    checkpoint, or the source trial; CheckpointDamaged if no manifest of the trial can be read.
    """
    if trial is not None and (own := _newest_first(store, trial)) is not None:
        return map(ResumePoint.continuing, own)
    sources = _sources(store, config)
    if (first := next(sources, None)) is None:
        return iter([ResumePoint()])
    weights_only = config.searcher.source_weights_only
    return (
        ResumePoint.warm(source, weights_only or _has_weights_alone(source))
        for source in chain([first], sources)
    )


def _newest_first(store: CheckpointStore, trial: str) -> Iterator[Manifest] | None:
    """Return a trial's checkpoints, of which the newest is read now; None if it has none.

    Raises CheckpointDamaged as `CheckpointStore.resume_candidates`.
    """
    others = store.newest_first(trial)
    newest = next(others, None)
    if newest is not None:
        return chain([newest], others)
    return iter(found) if (found := store.resume_candidates(trial)) else None


def _has_weights_alone(checkpoint: Manifest) -> bool:
    return any(file.path.startswith(f"{layout.IMPORTED}/") for file in checkpoint.files)


def _sources(store: CheckpointStore, config: ExperimentConfig) -> Iterator[Manifest]:
    """Return the checkpoints for a warm start, best first; none if the experiment names none."""
    searcher = config.searcher
    if searcher.source_checkpoint is not None:
        storage = config.checkpoint_storage
        is_alike = storage.url.partition("://")[0] == searcher.source_checkpoint.partition("://")[0]
        options = storage.options if is_alike else {}
        return iter([import_checkpoint(store, searcher.source_checkpoint, options)])
    if searcher.source_checkpoint_uuid is not None:
        return iter([store.open(searcher.source_checkpoint_uuid)])
    if searcher.source_trial_id is None:
        return iter(())
    try:
        found = _newest_first(store, find_trial(store, searcher.source_trial_id))
        return iter(()) if found is None else found
    except CheckpointNotFound as error:
        problem = f"searcher.source_trial_id: {error}, or source_checkpoint_uuid"
        raise CheckpointNotFound(problem) from None


def find_trial(store: CheckpointStore, wanted: int | str) -> str:
    """Return the id of the trial that has this id or number, and checkpoints.

    Raises CheckpointNotFound if no such trial has checkpoints, or several have.
    """
    trials = store.trials()
    found = [trial for trial in trials if wanted in (trial, trial_number(trial))]
    if len(found) == 1:
        return found[0]
    seen = ", ".join(f"{trial} ({trial_number(trial)})" for trial in found or trials) or "none"
    problem = f"{len(found)} trials have the number" if found else "no trial has the id or number"
    raise CheckpointNotFound(
        f"{problem} {wanted} in {store.url}; there: {seen}. Give the id of one of them"
    )
