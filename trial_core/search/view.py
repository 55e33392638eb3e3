"""A search as people see it: its records and its state, in an order that is worth reading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import best_of_trial, own_metric
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common import text_format
from trial_core.config.search_ranges import ranges_of
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, SearchError
from trial_core.search.log import RungReached, SearchEvent, SearchLog, searches
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment, as_recorded
from trial_core.search.state import SearchState, SearchTrial, last_settings, opened

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class SearchedName:
    """A hyperparameter that is searched for."""

    path: tuple[str | int, ...]
    short: str  # the end of its path that no other one has: ``lr`` for ``optimizer.lr``
    kind: str  # the type of its range: ``log``, ``int``, ``double`` or ``categorical``

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))

    def of(self, trial: SearchTrial) -> Any:
        """A trial's value; None if it has none, as a sampler may leave it out."""
        value: Any = trial.hyperparameters
        for step in self.path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def shown(self, trial: SearchTrial) -> str:
        """A trial's value as text."""
        value = self.of(trial)
        if isinstance(value, Mapping):
            inner = (
                f"{name}={text_format.setting(each)}" for name, each in text_format.flat(value)
            )
            return text_format.shortened(", ".join(inner), _SHOWN_CHARACTERS)
        return "" if value is None else text_format.setting(value)


@dataclass(frozen=True)
class SearchView:
    """A search: settings, state and records."""

    id: str
    experiment: SearchExperiment
    state: SearchState
    events: Sequence[SearchEvent]
    url: str = ""  # the URL of its storage; empty if it is simulated

    @property
    def metric(self) -> str:
        return self.experiment.searcher.metric

    @property
    def unit(self) -> str:
        return self.experiment.searcher.unit

    @property
    def sign(self) -> int:
        """A metric times this is the smaller, the better it is."""
        return 1 if self.experiment.searcher.smaller_is_better else -1

    @property
    def max_trials(self) -> int:
        """How many trials it begins."""
        return sum(plan.max_trials for plan in self.state.plans)

    @cached_property
    def names(self) -> Sequence[SearchedName]:
        """The hyperparameters that are searched for, in the order of the experiment."""
        found = dict(ranges_of(self.experiment.hyperparameters))
        ends = Counter(end for path in found for end in _ends(path))
        return [
            SearchedName(
                path, next((e for e in _ends(path) if ends[e] == 1), _ends(path)[-1]), each["type"]
            )
            for path, each in found.items()
        ]

    @cached_property
    def batches(self) -> int:
        """Batches trained by all trials, up to the rungs that they have reached."""
        return sum(trial.batches for trial in self.state.trials)

    @cached_property
    def ranked(self) -> Sequence[tuple[SearchTrial, RungReached, float]]:
        """See `SearchState`."""
        return self.state.ranked

    @property
    def best_so_far(self) -> Sequence[tuple[int, float]]:
        """For each result: the batches that all trials had trained, and the best metric then."""
        batches, best = dict[int, int](), math.inf
        points = []
        for event in self.events:
            if isinstance(event, RungReached):
                batches[event.trial] = event.batches
                if event.metric is not None:
                    best = min(best, self.sign * event.metric)
                if best < math.inf:
                    points.append((sum(batches.values()), self.sign * best))
        return points

    def summary(self) -> dict[str, Any]:
        """The search in a list, as plain data. `progress` is from 0 to 1, times are UTC."""
        best = self.state.best
        return {
            "search": self.id,
            "experiment": self.experiment.name,
            "searcher": self.experiment.searcher.name,
            "metric": self.metric,
            "smaller_is_better": self.experiment.searcher.smaller_is_better,
            "trials": len(self.state.trials),
            "max_trials": self.max_trials,
            "failed": self.state.failed,
            "batches": self.batches,
            "best": best and best[1].metric,
            "best_trial": best and best[0].id,
            "best_checkpoint": best and best[1].checkpoint,
            "progress": self.state.progress,
            "is_over": self.state.is_over,
            "began_at": self.events[0].at,
            "last_at": self.events[-1].at,
        }

    def details(self) -> dict[str, Any]:
        """The search with its trials. Lengths are in `unit`; a rung is the index of a length."""
        return {
            **self.summary(),
            "unit": self.unit,
            "brackets": self.state.plans,
            "trials": self.state.trials,
            "promotions": self.state.promotions,
        }


def view_of(search: Search, url: str = "") -> SearchView:
    """The view of a search, for the driver that has it."""
    return SearchView(search.id, search.experiment, search.state, search.events, url)


def stored_view(storage: Storage, search: str) -> SearchView:
    """The view of a stored search, whose experiment has only what the log has of it; nothing that
    the log names is imported. SearchError if there is no such search, or its log was altered."""
    events = SearchLog(storage, search).events if layout.is_name(search) else []
    if not events:
        there = text_format.first_few(searches(storage), 10) or "none"
        raise SearchError(
            f"there is no search {search!r} in {storage.url}; searches there: {there}"
        )
    first = opened(events)
    recorded = {
        "name": first.experiment, "entrypoint": "recorded:Search",
        "hyperparameters": first.hyperparameters, "searcher": last_settings(events),
        "reproducibility": {"experiment_seed": first.seed},
    }  # fmt: skip
    experiment = as_recorded(SearchExperiment, recorded, f"search {search} in {storage.url}")
    settings, plans = experiment.searcher, experiment.plan(first.searcher)
    state = SearchState(plans, settings.name, settings.stop_once, settings.smaller_is_better)
    for event in events:
        state.apply(event)
    return SearchView(search, experiment, state, events, storage.url)


def best_checkpoint(store: CheckpointStore, view: SearchView) -> Manifest | None:
    """The checkpoint of the best result. If that was deleted or is unreadable, the best one of its
    trial, if it is as good: a trial that validates between rungs keeps that. None if there is none.
    Raises StorageError."""
    if view.state.best is None or (uuid := view.state.best[1].checkpoint) is None:
        return None
    trial, _, metric = view.ranked[0]
    try:
        return store.open(uuid)
    except (CheckpointNotFound, CheckpointDamaged):
        kept = best_of_trial(store.list(trial.id)) if layout.is_name(trial.id) else None
    value = None if kept is None else own_metric(kept, view.metric)
    return kept if value is not None and view.sign * value <= view.sign * metric else None


def _ends(path: Sequence[str | int]) -> list[str]:
    """The ends of a path, the shortest first: ``lr``, ``optimizer.lr``. None begins in a list."""
    starts = [i for i in reversed(range(len(path))) if isinstance(path[i], str)]
    return [".".join(map(str, path[start:])) for start in starts]
