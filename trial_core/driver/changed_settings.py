"""Warns of changed settings that have no effect, because a checkpoint's state is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.common.text_format import first_few, flat, setting, told_apart
from trial_core.config import ExperimentConfig

SHOWN = 6
"""At most so many changed settings, and so many optimizers and schedulers, are named."""

_ABSENT = object()


def override_warning(
    point: ResumePoint,
    config: ExperimentConfig,
    of_optimizers: Sequence[str],
    of_schedulers: Sequence[str],
) -> str | None:
    """Return a warning that names the settings a restore has overridden; None without any.

    Settings of optimizers count as overridden only if hyperparameters have changed: the trial may
    change them itself, batch by batch. A schedule's count also if the length of training has.

    Args:
        of_optimizers, of_schedulers: the overridden settings, see `ReadyToTrain`.
    """
    saved = point.checkpoint
    if saved is None or point.restore == "weights":
        return None
    changes = _changes(saved.hyperparameters, config.hyperparameters)
    overridden = [*(of_optimizers if changes else ()), *of_schedulers]
    if of_schedulers and saved.config:  # it is recorded
        changes += _changes(_length(saved.config), _length(config.digested()))
    if not changes or not overridden:
        return None
    instead = "set searcher.source_weights_only=true"
    if point.restore == "everything":
        instead = (
            "begin a new trial with the checkpoint's weights: without --resume (in a script, "
            f"without latest_checkpoint), with searcher.source_checkpoint_uuid={saved.uuid} and "
            "searcher.source_weights_only=true"
        )
    return (
        f"changed since the checkpoint: {first_few(changes, SHOWN)}. But the restore brought back "
        f"the checkpoint's values, which count: {first_few(overridden, SHOWN, '; ')}. To train "
        f"with the new ones, {instead}"
    )


def _length(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"searcher.max_length": (config.get("searcher") or {}).get("max_length")}


def _changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """``lr 0.001 -> 0.0001``, ``model.depth 12, which is new``, ``warmup 100, which is gone``."""
    before, now = dict(flat(saved)), dict(flat(given))
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if new is _ABSENT:
            found.append(f"{name} {setting(old)}, which is gone")
        elif old is _ABSENT:
            found.append(f"{name} {setting(new)}, which is new")
        elif old != new:
            found.append(f"{name} {' -> '.join(told_apart(old, new))}")
    return found
