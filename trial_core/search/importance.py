"""How much each hyperparameter of a search matters: a simple measure that needs no library."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from trial_core.common.text_format import is_finite_number, setting
from trial_core.search.view import SearchedName, SearchView

ENOUGH, GROUPS = 20, 4


def importance(view: SearchView) -> tuple[int, list[tuple[SearchedName, float]]] | None:
    """The share of the differences between trials that each hyperparameter explains, from 0 to 1.

    Trials are compared by their ranks at one length, the one that most have reached. They are put
    in groups by a hyperparameter: by its choice, or numbers in four groups of equal size. The share
    is the ranks' variance between the groups (epsilon squared), less what chance gives on average.
    What two hyperparameters do together is not seen.

    Returns:
        The length, and the shares, the largest first; None of fewer than 20 results.
    """
    counts = Counter(each.length for trial in view.state.trials for each in trial.reached)
    length, count = max(counts.items(), key=lambda each: (each[1], -each[0]), default=(0, 0))
    if count < ENOUGH:
        return None
    there = {
        trial.number: (trial, math.inf if each.metric is None else view.sign * each.metric)
        for trial in view.state.trials
        for each in trial.reached
        if each.length == length
    }
    ranks = _ranks([value for _, value in there.values()])
    values = {name: [name.of(trial) for trial, _ in there.values()] for name in view.names}
    shares = [(name, _share(each, ranks)) for name, each in values.items()]
    return length, sorted(shares, key=lambda each: -each[1])


def _ranks(values: Sequence[float]) -> list[float]:
    """The values' ranks; equal values have their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, each) + bisect_right(ordered, each)) / 2 for each in values]


def _share(values: Sequence[Any], ranks: Sequence[float]) -> float:
    groups: Sequence[Any] = [setting(value) for value in values]
    if all(map(is_finite_number, values)) and len(set(values)) > GROUPS:
        groups = [min(int(GROUPS * rank / len(values)), GROUPS - 1) for rank in _ranks(values)]
    inside: dict[Any, list[float]] = defaultdict(list)
    for group, rank in zip(groups, ranks, strict=True):
        inside[group].append(rank)
    total = sum((rank - fmean(ranks)) ** 2 for rank in ranks)
    if not total or len(inside) in (1, len(ranks)):
        return 0.0
    between = sum(len(each) * (fmean(each) - fmean(ranks)) ** 2 for each in inside.values())
    by_chance = (len(ranks) - 1) / (len(ranks) - len(inside))
    return max(0.0, 1 - (1 - between / total) * by_chance)
