"""Tells what has changed between a checkpoint and the run that resumes it, and what counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.common.text_format import first_few, flat, one_line, setting, told_apart
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.messages import RestoredSettings

SHOWN = 12
"""At most so many changed settings, and so many optimizers and schedulers, are named."""

_ABSENT = object()


KEPT = ("optimizer", "scheduler", "scaler", "engine")
"""Parts of a trial whose settings a run may keep as in the checkpoint."""


def check_keep(keep: Sequence[str]) -> None:
    """Check the names of settings to keep: ``optimizer``, or one of its settings: ``optimizer.lr``.

    Raises ConfigError if one is not of that form.
    """
    for each in keep:
        part, _, setting_of_it = each.partition(".")
        if part not in KEPT:
            raise ConfigError(
                f"keep: {each!r} is not known; give {', '.join(KEPT)}, or one setting of it, as "
                "optimizer.lr"
            )
        if part == "scheduler" and setting_of_it:
            raise ConfigError(
                f"keep: {each!r} is one setting of a schedule, which is kept as a whole: give "
                "scheduler"
            )


def changes_since_checkpoint(
    point: ResumePoint,
    config: ExperimentConfig,
    versions: Mapping[str, str],
    settings: RestoredSettings,
) -> list[str]:
    """Return sentences that tell all that has changed since the checkpoint; none without a change.

    The versions are those of this run's software, empty if they are not known.
    """
    saved = point.checkpoint
    if saved is None or point.restore == "weights":
        return []
    effects: list[str] = []
    if point.restore == "everything" and saved.config:  # it is recorded
        changes = _changes(saved.config, config.digested())
        if saved.environment_digest not in ("", config.environment_digest(saved.trial)):
            changes.append("environment.environment_variables")  # a value may be a credential
        changes += _changes(saved.versions, versions or saved.versions)
        effects = [*_effects(point, saved, config)]
    else:
        changes = _changed_hyperparameters(saved, config)
    told = []
    if changes:
        told.append(f"changed since it was saved: {first_few(changes, SHOWN)}")
    told += effects
    if settings.new:
        told.append(f"The new values count: {first_few(settings.new, SHOWN, '; ')}")
    if settings.kept:
        told.append(f"The checkpoint's values stay: {first_few(settings.kept, SHOWN, '; ')}")
    if settings.not_kept:
        told.append(f"Not kept: {first_few(settings.not_kept, SHOWN, '; ')}")
    if changes and not settings.is_known:
        told.append(
            "The checkpoint has no record of the settings of its optimizers and schedulers, so "
            "their values stay"
        )
    if told:
        at = saved.progress.batches_trained
        told[0] = f"checkpoint {saved.uuid} (batch {at}): {told[0]}"
    return told


def other_hyperparameters(saved: Manifest, config: ExperimentConfig) -> list[str]:
    """Return a sentence if the checkpoint was trained with other hyperparameters; else nothing."""
    changes = first_few(_changed_hyperparameters(saved, config), SHOWN)
    at = f"checkpoint {saved.uuid} (batch {saved.progress.batches_trained})"
    count = "was trained with other hyperparameters than these, which count"
    return [f"{at} {count}: {changes}"] if changes else []


def _changed_hyperparameters(saved: Manifest, config: ExperimentConfig) -> list[str]:
    if not saved.config and not saved.hyperparameters:  # another program has written it
        return []
    return _changes(
        {"hyperparameters": saved.hyperparameters}, {"hyperparameters": config.hyperparameters}
    )


def _effects(point: ResumePoint, saved: Manifest, config: ExperimentConfig) -> Iterator[str]:
    """What follows from changes of the searcher, besides the values."""
    before, now = dict(flat(saved.config)), dict(flat(config.digested()))
    sources = [
        each for each in now
        if each.startswith("searcher.source_") and now[each] and now[each] != before.get(each)
    ]  # fmt: skip
    if sources:
        yield (
            f"{' and '.join(sources)}: no effect, because the trial continues its own checkpoint; "
            "a source is for a new trial"
        )
    if saved.progress.best_metric is not None and point.progress.best_metric is None:
        yield "The best value so far does not count: it is of another metric or direction"


def _changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """``lr 0.001 -> 0.0001``, ``model.depth 12, which is new``, ``warmup 100, which is gone``."""
    before, now = dict(flat(saved)), dict(flat(given))
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        shown = one_line(name)  # it may come from the storage
        if new is _ABSENT:
            found.append(f"{shown} {setting(old)}, which is gone")
        elif old is _ABSENT:
            found.append(f"{shown} {setting(new)}, which is new")
        elif old != new:
            found.append(f"{shown} {' -> '.join(told_apart(old, new))}")
    return found
