"""A trial as its storage shows it: its settings, its results and its curves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import read_json
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import best_of_trial, own_metric
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.text_format import flat
from trial_core.errors import CheckpointNotFound
from trial_core.observe.report.history import ReportHistory
from trial_core.observe.report.live_report import HISTORY

_OF_HYPERPARAMETERS = "hyperparameters."


@dataclass(frozen=True)
class StoredTrial:
    """A trial in a storage."""

    trial: str
    newest: Manifest  # its newest checkpoint
    metric: str
    best: float | None  # its best value of the searcher metric; None without one
    settings: dict[str, Any]  # its experiment's fields by their paths, and the digest of its `code`
    results: dict[str, Any]
    history: ReportHistory

    @cached_property
    def hyperparameters(self) -> dict[str, Any]:
        """Its hyperparameters by their paths."""
        of = _OF_HYPERPARAMETERS
        found = {key: value for key, value in self.settings.items() if key.startswith(of)}
        return {key.removeprefix(of): value for key, value in found.items()}

    @property
    def other_settings(self) -> dict[str, Any]:
        """Its settings without hyperparameters and code."""
        of = (_OF_HYPERPARAMETERS, "code")
        return {key: value for key, value in self.settings.items() if not key.startswith(of)}

    @property
    def code(self) -> str:
        """The digest of its code; empty if none is stored."""
        return str(self.settings["code"] or "")


def read_trial(store: CheckpointStore, trial: str) -> StoredTrial:
    """Read a stored trial. A manifest that cannot be read is a warning; without any that can,
    CheckpointDamaged is raised, and CheckpointNotFound without any checkpoint."""
    saved = store.resume_candidates(trial)
    if not saved:
        there = ", ".join(store.trials()) or "none"
        raise CheckpointNotFound(
            f"no checkpoint of trial {trial} in {store.url}; trials there: {there}"
        )
    newest, best = saved[0], best_of_trial(saved)
    key = layout.run_file_key(trial, HISTORY)
    history = read_json(store.storage, key, ReportHistory, is_silent=True) or ReportHistory()
    settings = dict(flat({**newest.config, "hyperparameters": newest.hyperparameters}))
    settings["code"] = newest.code and newest.code.digest
    metric = str(settings.get("searcher.metric"))
    value = None if best is None else own_metric(best, metric)
    results = {
        "batches": newest.progress.batches_trained,
        "ended": history.ended or None,  # None: it trains, or was killed
        f"best {metric}": value,
        "best at batch": best and best.progress.batches_trained,
        **{f"last {name}": value for name, value in newest.last_validation.items()},
    }
    return StoredTrial(trial, newest, metric, value, settings, results, history)


def differing(rows: list[dict[str, Any]]) -> list[str]:
    """The names whose values are not the same in all rows, in their order."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
