"""Asynchronous successive halving: which trials of a bracket continue, and when a new one begins.

A trial that reaches a rung is compared with those that have reached it before: it continues if it
is among the best ``1/divisor`` of them. The rules are Determined's, so a search makes the same
decisions from the same results. A bracket with one rung is a random search. Pure: no clock, no
storage, no chance.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trial_core.common.text_format import ordinal
from trial_core.search.plan import BracketPlan

WORST = math.inf
TO_ITS_END = "trained to its end"


@dataclass(frozen=True)
class Begin:
    """Begin a new trial of a bracket."""

    bracket: int


@dataclass(frozen=True)
class Advance:
    """Train a trial to a rung. `why` is for people."""

    trial: int
    rung: int
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class End:
    """A trial is never trained further."""

    trial: int
    why: str = field(default="", compare=False)


Action = Begin | Advance | End


@dataclass
class _Place:
    """A trial's place in a rung. `value`: the smaller, the better."""

    value: float
    trial: int
    is_promoted: bool = False


class _Rung:
    """The trials that have reached a rung, the best first; of equals, the first to come."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.outstanding = 0

    def insert(self, trial: int, value: float, before_equals: bool = False) -> int:
        """Insert a trial; return its index."""
        find = bisect.bisect_left if before_equals else bisect.bisect_right
        index = find(self.places, value, key=lambda place: place.value)
        self.places.insert(index, _Place(value, trial))
        return index


class Bracket:
    """The decisions of one bracket. Its methods return what follows from an event.

    Args:
        number: the bracket's number in the search.
        kind: the searcher's name. Of a grid, a trial with invalid hyperparameters is not replaced.
    """

    def __init__(self, number: int, plan: BracketPlan, kind: str = "asha") -> None:
        self.number = number
        self.plan = plan
        self._kind = kind
        self._divisor = plan.divisor
        self._rungs = [_Rung() for _ in plan.rungs]
        self._rung_of: dict[int, int] = {}
        self._exited: set[int] = set()
        self._ended: set[int] = set()
        self._begun = 0
        self._invalid = 0

    def fill(self) -> list[Action]:
        """New trials, as long as fewer are due than may be, and not all have begun."""
        due = self._begun - len(self._rung_of) + sum(rung.outstanding for rung in self._rungs)
        begun = self._begun - (0 if self._kind == "grid" else self._invalid)
        count = max(min(self.plan.concurrent - due, self.plan.max_trials - begun), 0)
        self._begun += count
        return [Begin(self.number)] * count

    def extend(self, plan: BracketPlan) -> list[Action]:
        """Continue with more trials, or with rungs above the last one: the best of those that have
        reached that continue. No earlier decision changes."""
        last, is_longer = len(self._rungs) - 1, len(plan.rungs) > len(self._rungs)
        self.plan = plan
        self._rungs += [_Rung() for _ in plan.rungs[last + 1 :]]
        self._ended -= self._may_continue(last) - self._exited
        actions = self._extend_from(last) if is_longer else []
        if not is_longer:
            for place in self._rungs[last].places:
                actions += self._end(place.trial, TO_ITS_END)
        return [*actions, *self.fill(), *self._end_who_cannot_continue()]

    def has_ended(self, trial: int) -> bool:
        """Return whether a trial is never trained further, as it is now."""
        return trial in self._ended

    def created(self, trial: int) -> list[Action]:
        """A trial has got its hyperparameters."""
        self._rung_of[trial] = 0
        self._rungs[0].outstanding += 1
        return [Advance(trial, 0, "new")]

    def reached(self, trial: int, value: float) -> list[Action]:
        """A trial has reached the rung that it was trained to, with this metric: the smaller, the
        better. One that is not finite is the worst."""
        return self._decide(trial, value if math.isfinite(value) else WORST)

    def exited(self, trial: int, is_invalid: bool = False) -> list[Action]:
        """A trial has failed or has ended itself: it is the worst of the rung it was trained to.
        One whose hyperparameters are invalid is taken out of the search."""
        self._exited.add(trial)
        self._ended.add(trial)
        if not is_invalid:
            return self._decide(trial, WORST)
        self._invalid += 1
        self._rungs[self._rung_of[trial]].outstanding -= 1
        for rung in self._rungs:
            rung.places = [place for place in rung.places if place.trial != trial]
        return self.fill()

    def rank(self, trial: int, rung: int) -> str:
        """A trial's rank among those that have reached a rung, for people: ``2nd of 5``."""
        places = self._rungs[rung].places
        index = next(i for i, place in enumerate(places, 1) if place.trial == trial)
        return f"{ordinal(index)} of {len(places)}"

    @property
    def progress(self) -> float:
        """From 0 to 1: Determined's estimate, which allows for late promotions."""
        first, most = len(self._rungs[0].places), self.plan.max_trials
        completed = len(self._ended) - (0 if self._kind == "grid" else self._invalid)
        if self._kind in ("random", "grid"):
            return completed / most
        progress = first / (1.2 * most)
        return max(progress, completed / most) if first >= most else progress

    # ---------------------------------------------------------------------------- the decisions

    def _decide(self, trial: int, value: float) -> list[Action]:
        index = self._rung_of[trial]
        rung = self._rungs[index]
        rung.outstanding -= 1
        actions: list[Action] = []
        if index == len(self._rungs) - 1:
            rung.insert(trial, value)
            actions += self._end(trial, TO_ITS_END)
        elif (promoted := self._promoted(index, trial, value)) is not None:
            actions.append(self._advance(promoted, index))
            if promoted in self._exited:  # as if it had been trained, and were the worst again
                return self._decide(promoted, WORST)
        return [*actions, *self.fill(), *self._end_who_cannot_continue()]

    def _promoted(self, index: int, trial: int, value: float) -> int | None:
        """Insert a trial into a rung, and return who is promoted because of that, if any: the trial
        itself, or one that was too many before, for which there is room now."""
        rung = self._rungs[index]
        before = int(len(rung.places) / self._divisor)
        after = int((len(rung.places) + 1) / self._divisor)
        place = rung.insert(trial, value)
        if place >= after:
            if after == before or rung.places[before].is_promoted:
                return None
            place = before
        rung.places[place].is_promoted = True
        return rung.places[place].trial

    def _advance(self, trial: int, index: int) -> Advance:
        self._rung_of[trial] = index + 1
        self._ended -= {trial} - self._exited  # after a trial that was above it was invalid
        self._rungs[index + 1].outstanding += 1
        return Advance(trial, index + 1, self.rank(trial, index))

    def _may_continue(self, last: int) -> set[int]:
        """Who waits for its promotion if there are more trials, or rungs above the last one."""
        return set(self._rung_of)

    def _extend_from(self, last: int) -> list[Action]:
        """Promote the best of the rung that was the last one."""
        best = self._rungs[last].places[: int(len(self._rungs[last].places) / self._divisor)]
        actions: list[Action] = []
        for place in best:
            place.is_promoted = True
            advance = self._advance(place.trial, last)
            actions += [advance] if place.trial not in self._exited else []
        for place in best:
            if place.trial in self._exited:
                actions += self._decide(place.trial, WORST)
        return actions

    def _end(self, trial: int, why: str) -> list[Action]:
        if trial in self._ended:
            return []
        self._ended.add(trial)
        return [End(trial, why)]

    def _end_who_cannot_continue(self) -> list[Action]:
        """End the trials that wait at a rung which nobody is trained to any more."""
        if len(self._rungs[0].places) < self.plan.max_trials:
            return []
        actions: list[Action] = []
        for index, rung in enumerate(self._rungs):
            if rung.outstanding:
                break
            for place in rung.places:
                if not place.is_promoted:
                    actions += self._end(place.trial, self.rank(place.trial, index))
        return actions


class StoppingBracket(Bracket):
    """Decides once for each trial and rung: it continues at once, or never (``stop_once``)."""

    def _decide(self, trial: int, value: float) -> list[Action]:
        index = self._rung_of[trial]
        rung = self._rungs[index]
        rung.outstanding -= 1
        place = rung.insert(trial, value, before_equals=True)
        is_last = index == len(self._rungs) - 1
        is_good = place < max(int(len(rung.places) / self._divisor), 1)
        if is_good and not is_last and trial not in self._exited:
            return [self._advance(trial, index)]
        why = TO_ITS_END if is_last else self.rank(trial, index)
        return [*self._end(trial, why), *self.fill()]

    def _end_who_cannot_continue(self) -> list[Action]:
        return []  # they have ended

    def _may_continue(self, last: int) -> set[int]:
        return {place.trial for place in self._rungs[last].places}

    def _extend_from(self, last: int) -> list[Action]:
        places = [each for each in self._rungs[last].places if each.trial not in self._exited]
        most = max(int(len(self._rungs[last].places) / self._divisor), 1)
        actions: list[Action] = [self._advance(each.trial, last) for each in places[:most]]
        for place in places[most:]:
            actions += self._end(place.trial, self.rank(place.trial, last))
        return actions


class ProgressiveBracket(Bracket):
    """PASHA: the last rung is the second at first, and grows while the order there changes, which
    is when its trials are in another order than at the rung below it."""

    def __init__(self, number: int, plan: BracketPlan, kind: str = "pasha") -> None:
        super().__init__(number, plan, kind)
        self._last = min(1, len(plan.rungs) - 1)

    def _decide(self, trial: int, value: float) -> list[Action]:
        index = self._rung_of[trial]
        if index < self._last or index == len(self._rungs) - 1:
            return super()._decide(trial, value)
        rung = self._rungs[index]
        rung.outstanding -= 1
        rung.insert(trial, value)
        actions: list[Action] = []
        if self._has_other_order(index):
            self._last += 1
            for place in rung.places[: int(len(rung.places) / self._divisor)]:
                if place.trial not in self._exited:
                    place.is_promoted = True
                    actions.append(self._advance(place.trial, index))
        return [*actions, *self.fill(), *self._end_who_cannot_continue()]

    def _extend_from(self, last: int) -> list[Action]:
        if self._last < last or (last and not self._has_other_order(last)):
            return []
        self._last = last + 1
        return super()._extend_from(last)

    def _has_other_order(self, index: int) -> bool:
        here = [place.trial for place in self._rungs[index].places]
        below = [place.trial for place in self._rungs[index - 1].places if place.trial in here]
        return here != below


def brackets(plans: Sequence[BracketPlan], kind: str, stops_once: bool = False) -> list[Bracket]:
    """The brackets of a search whose searcher is named `kind`; for `stops_once` see
    `StoppingBracket`."""
    bracket = ProgressiveBracket if kind == "pasha" else StoppingBracket if stops_once else Bracket
    return [bracket(i, plan, kind) for i, plan in enumerate(plans)]
