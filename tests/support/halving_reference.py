"""What Determined's searchers decide, written down plainly, to compare `trial_core.search` with.

Every question is answered from the whole list of results. Nothing here is taken from
`trial_core.search`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NEVER = float("inf")


@dataclass
class ReferenceBracket:
    """A bracket. `values[rung][trial]` is a result, the smaller the better, in order of arrival."""

    lengths: list[int]
    trials: int
    side_by_side: int
    divisor: float
    stops_once: bool = False
    is_grid: bool = False
    is_full: bool = False
    values: list[dict[int, float]] = field(default_factory=list)
    promoted: list[set[int]] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)
    asked_for: int = 0
    exited: set[int] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [{} for _ in self.lengths]
        self.promoted = [set() for _ in self.lengths]
        self.training = [0 for _ in self.lengths]

    def start(self) -> list[Any]:
        count = min(self.side_by_side, self.trials)
        self.asked_for = count
        return ["create"] * count

    def create(self, trial: int) -> None:
        self.at[trial] = 0
        self.training[0] += 1

    def result(self, trial: int, value: float) -> list[Any]:
        return self._result(trial, value if math.isfinite(value) else NEVER)

    def exit(self, trial: int) -> list[Any]:
        self.exited.add(trial)
        return self._result(trial, NEVER)

    def exit_invalid(self, trial: int) -> list[Any]:
        self.invalid.add(trial)
        self.training[self.at[trial]] -= 1
        for values in self.values:
            values.pop(trial, None)
        if self.is_grid:
            return self._next()
        self.asked_for += 1
        return ["create"]

    def progress(self) -> float:
        done = len(set(self.closed) | self.exited)
        if self.is_full:
            return (done + (len(self.invalid) if self.is_grid else 0)) / self.trials
        first = len(self.values[0])
        rough = first / (1.2 * self.trials)
        return max(rough, done / self.trials) if first == self.trials else rough

    def _next(self) -> list[Any]:
        if self.asked_for - (0 if self.is_grid else len(self.invalid)) >= self.trials:
            return []
        self.asked_for += 1
        return ["create"]

    def _ranked(self, rung: int) -> list[int]:
        """Trials, best first. Of equals the first to come is first, with `stops_once` the last."""
        came = list(self.values[rung])
        order = -1 if self.stops_once else 1
        return sorted(came, key=lambda each: (self.values[rung][each], order * came.index(each)))

    def _result(self, trial: int, value: float) -> list[Any]:
        rung = self.at[trial]
        self.training[rung] -= 1
        self.values[rung][trial] = value
        if rung == len(self.lengths) - 1:
            if trial not in self.exited:
                self.closed.append(trial)
            return self._next() + self._close_rest()
        if self.stops_once:
            count = max(math.floor(len(self.values[rung]) / self.divisor), 1)
            if trial in self._ranked(rung)[:count] and trial not in self.exited:
                return self._train(trial, rung + 1)
            if trial not in self.exited:
                self.closed.append(trial)
            return self._next()
        chosen = self._chosen(trial, rung)
        if chosen is None:
            return self._next() + self._close_rest()
        self.promoted[rung].add(chosen)
        if chosen in self.closed:
            # Its rung had been complete until a trial turned out to be invalid. Determined sends
            # the closed trial a workload that it cannot do: a fault that is not to be repeated.
            self.closed.remove(chosen)
        train = self._train(chosen, rung + 1)
        if chosen in self.exited:
            return self._result(chosen, NEVER)
        return train + self._close_rest()

    def _chosen(self, trial: int, rung: int) -> int | None:
        count = len(self.values[rung])
        allowed, allowed_before = int(count / self.divisor), int((count - 1) / self.divisor)
        ranked = self._ranked(rung)
        if ranked.index(trial) < allowed:
            return trial
        if allowed > allowed_before and ranked[allowed - 1] not in self.promoted[rung]:
            return ranked[allowed - 1]
        return None

    def _train(self, trial: int, rung: int) -> list[Any]:
        self.at[trial] = rung
        self.training[rung] += 1
        return [(trial, rung)]

    def _close_rest(self) -> list[Any]:
        """Close who waits where no trial arrives any more."""
        if not self.stops_once and len(self.values[0]) == self.trials:
            for rung in range(len(self.lengths)):
                if self.training[rung]:
                    break
                for trial in self._ranked(rung):
                    if trial not in {*self.promoted[rung], *self.closed, *self.exited}:
                        self.closed.append(trial)
        return []


def lengths(count: int, divisor: float, longest: int) -> list[int]:
    """The lengths of rungs: the last is the longest, each other one `divisor` times shorter."""
    found = [longest / math.pow(divisor, steps) for steps in range(count)]
    return [max(math.floor(each), 1) for each in reversed(found)]


def asha(
    count: int, divisor: float, longest: int, trials: int, side_by_side: int, **kind: Any
) -> ReferenceBracket:
    wanted = side_by_side or math.floor(math.pow(divisor, count - 1))
    return ReferenceBracket(
        lengths(count, divisor, longest), trials, max(1, min(wanted, trials)), divisor, **kind
    )


def adaptive_asha(
    most: int, divisor: float, longest: int, trials: int, side_by_side: int, mode: str,
    counts: Sequence[int] = (), **kind: Any,
) -> list[ReferenceBracket]:  # fmt: skip
    if not counts:
        by_length = math.floor(math.log(longest) / math.log(divisor)) + 1
        by_trials = math.floor(math.log(trials) / math.log(divisor)) + 1
        most = min(most, by_length, by_trials)
        first = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[mode]
        counts = range(first, most + 1)
    counts = sorted(counts)[::-1]
    shares = trials_of_brackets(trials, divisor, counts)
    sides = side_by_side_of_brackets(side_by_side, divisor, shares)
    return [
        asha(count, divisor, longest, share, side, **kind)
        for count, share, side in zip(counts, shares, sides, strict=True)
    ]


def trials_of_brackets(trials: int, divisor: float, counts: Sequence[int]) -> list[int]:
    """About equal work for each bracket; the first gets what is left over."""
    needs = [math.pow(divisor, count - 1) / count for count in counts]
    total = 0.0
    for need in needs:
        total += need
    shares = [max(int(need / total * trials), 1) for need in needs]
    left = trials - sum(shares)
    return [shares[0] + max(left, 0), *shares[1:]]


def side_by_side_of_brackets(total: int, divisor: float, trials: Sequence[int]) -> list[int]:
    """Evenly, the first get one more; by default, as many as the last bracket has trials."""
    if not total:
        return [max(trials[-1], int(divisor))] * len(trials)
    total = max(total, len(trials))
    return [total // len(trials) + int(i < total % len(trials)) for i in range(len(trials))]
