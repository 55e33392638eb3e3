"""How a search divides its trials: rungs, brackets, and how many trials are trained side by side.

The numbers are those of Determined's searchers ``asha`` and ``adaptive_asha``. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_TRIALS = 100_000

Mode = Literal["conservative", "standard", "aggressive"]

_RUNGS_OF_BRACKETS: Mapping[Mode, Callable[[int], Sequence[int]]] = {
    "conservative": lambda most: range(1, most + 1),
    "standard": lambda most: range((most - 1) // 2 + 1, most + 1),
    "aggressive": lambda most: [most],
}


@dataclass(frozen=True)
class BracketPlan:
    """A part of a search whose trials are compared with each other alone.

    Attributes:
        rungs: lengths of training, ascending. A trial that reaches the last one is trained.
        max_trials: how many trials it begins.
        concurrent: how many of its trials are due at a time.
        divisor: one in so many trials continues from a rung; 1: all.
    """

    rungs: tuple[int, ...]
    max_trials: int
    concurrent: int
    divisor: float

    def extended(self, max_length: int, max_trials: int, concurrent: int) -> BracketPlan:
        """The bracket with more trials, or a longer training, which has its rungs above these."""
        lengths = list(self.rungs)
        while self.divisor > 1 and lengths[-1] * self.divisor < max_length:
            lengths.append(max(int(lengths[-1] * self.divisor), lengths[-1] + 1))
        if lengths[-1] < max_length:
            lengths.append(max_length)
        return BracketPlan(
            tuple(lengths), max_trials, min(concurrent or self.concurrent, max_trials), self.divisor
        )

    def continues(self, other: BracketPlan) -> bool:
        """Return whether this is the same bracket, with the same or greater maxima."""
        old, new = self.rungs[: len(other.rungs)], self.rungs[len(other.rungs) :]
        return (
            old == other.rungs
            and list(new) == sorted({*new})
            and (not new or new[0] > old[-1])
            and other.max_trials <= self.max_trials <= MAX_TRIALS
            and 1 <= self.concurrent <= MAX_TRIALS
            and self.divisor == other.divisor
        )


def rungs(count: int, divisor: float, max_length: int) -> tuple[int, ...]:
    """The lengths of `count` rungs, the last of which is `max_length`."""
    return tuple(max(int(max_length / divisor ** (count - i - 1)), 1) for i in range(count))


def asha(
    count: int, divisor: float, max_length: int, max_trials: int, concurrent: int
) -> BracketPlan:
    """One bracket of `count` rungs, with so many trials side by side; 0 for as many as bring one to
    the last rung."""
    if concurrent == 0:
        concurrent = max(min(int(divisor ** (count - 1)), max_trials), 1)
    return BracketPlan(
        rungs(count, divisor, max_length),
        max_trials,
        min(concurrent, max_trials),
        divisor if count > 1 else 1.0,
    )


def extended(
    plans: Sequence[BracketPlan], divisor: float, max_length: int, max_trials: int, concurrent: int
) -> list[BracketPlan]:
    """The brackets of a search that continues with greater maxima. `concurrent` trials run side by
    side; 0 for as many as before."""
    trials = trials_of_brackets([len(each.rungs) for each in plans], divisor, max_trials)
    trials = [max(each.max_trials, trials[i]) for i, each in enumerate(plans)]
    for i in reversed(range(len(plans))):
        surplus = max(sum(trials) - max_trials, 0)
        trials[i] -= min(surplus, trials[i] - plans[i].max_trials)
    sides = _concurrent_in_brackets(concurrent, divisor, trials) if concurrent else [0] * len(plans)
    return [each.extended(max_length, trials[i], sides[i]) for i, each in enumerate(plans)]


def adaptive_asha(
    max_rungs: int,
    divisor: float,
    max_length: int,
    max_trials: int,
    concurrent: int,
    mode: Mode,
    bracket_rungs: Sequence[int] = (),
) -> list[BracketPlan]:
    """Brackets of different numbers of rungs, those with most rungs first, each of about as many
    batches, and with its part of `concurrent`. `bracket_rungs` has their numbers of rungs, in place
    of `mode` and `max_rungs`."""
    counts = list(bracket_rungs)
    if not counts:
        most = min(
            max_rungs,
            int(math.log(max_length) / math.log(divisor)) + 1,
            int(math.log(max_trials) / math.log(divisor)) + 1,
        )
        counts = list(_RUNGS_OF_BRACKETS[mode](most))
    counts.sort(reverse=True)
    trials = trials_of_brackets(counts, divisor, max_trials)
    sides = _concurrent_in_brackets(concurrent, divisor, trials)
    return [asha(count, divisor, max_length, trials[i], sides[i]) for i, count in enumerate(counts)]


def trials_of_brackets(counts: Sequence[int], divisor: float, max_trials: int) -> list[int]:
    weights = [divisor ** (count - 1) / count for count in counts]
    total = sum(weights)
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def _concurrent_in_brackets(concurrent: int, divisor: float, trials: Sequence[int]) -> list[int]:
    if concurrent == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    each, rest = divmod(max(concurrent, len(trials)), len(trials))
    return [each + (i < rest) for i in range(len(trials))]
