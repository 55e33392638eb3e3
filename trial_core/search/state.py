"""The state of a search: what its log says, and what is due next.

`SearchState.apply` takes the records in order. It knows no clock, no storage and no driver, so
every driver that has read the same log continues alike, and `simulate` needs no training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trial_core.common import text_format
from trial_core.errors import SearchError
from trial_core.search.halving import TO_ITS_END, Action, Advance, Begin, Bracket, End, brackets
from trial_core.search.log import Begun, Changed, Exited, NoMore, Opened, RungReached, SearchEvent
from trial_core.search.plan import BracketPlan

Status = Literal["due", "waits", "ended", "failed", "invalid"]


@dataclass
class SearchTrial:
    """A trial of a search.

    Attributes:
        number, id: see `Begun`.
        status: ``due``: it is to be trained to `rung`; ``waits``: it has reached that; ``ended``:
            it is not trained further.
        rung: the index of the rung that it is trained to, or has reached.
        reached: its results, a rung each.
        why: of its status, for people: ``2nd of 9 at 100``.
    """

    number: int
    id: str
    bracket: int
    hyperparameters: Mapping[str, Any]
    status: Status = "due"
    rung: int = 0
    reached: list[RungReached] = field(default_factory=list)
    why: str = ""

    @property
    def batches(self) -> int:
        """Batches trained at the last rung that it has reached."""
        return self.reached[-1].batches if self.reached else 0


class SearchState:
    """What a search with these brackets has done, and what is due."""

    def __init__(
        self,
        plans: Sequence[BracketPlan],
        kind: str,
        stops_once: bool = False,
        smaller_is_better: bool = True,
    ) -> None:
        self.trials: list[SearchTrial] = []  # by number
        self.work: list[Begin | Advance] = []  # what is due, in the order in which it came due
        self.promotions: list[Advance] = []  # who was to be trained further, and why, in order
        self.invalid = 0  # trials that had invalid hyperparameters
        self.failed = 0  # trials that have failed, without those, and without uncounted ones
        self.has_no_more = False  # the sampler had none, and nothing came after that
        self.applied = 0  # the number of the last record
        self._smaller_is_better = smaller_is_better
        self._brackets: list[Bracket] = brackets(plans, kind, stops_once)
        for bracket in self._brackets:
            self._follow(bracket.fill())

    @property
    def is_over(self) -> bool:
        """True if nothing is due: no trial is begun or trained any more."""
        return all(self.has_no_more and isinstance(each, Begin) for each in self.work)

    @property
    def plans(self) -> list[BracketPlan]:
        """The brackets, with the maxima that count now."""
        return [each.plan for each in self._brackets]

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        if self.is_over:
            return 1.0
        return sum(each.progress for each in self._brackets) / len(self._brackets)

    @property
    def ranked(self) -> Sequence[tuple[SearchTrial, RungReached, float]]:
        """The trials that have a result, the best one first; each with its best, and its metric. Of
        equals, the first is better."""
        results = sorted(
            (self._value(each), each.number, each.metric, each)
            for trial in self.trials
            for each in trial.reached
            if each.metric is not None
        )
        best: dict[int, tuple[SearchTrial, RungReached, float]] = {}
        for *_, metric, each in results:
            best.setdefault(each.trial, (self.trials[each.trial], each, metric))
        return list(best.values())

    @property
    def best(self) -> tuple[SearchTrial, RungReached] | None:
        """The best result so far and its trial."""
        return next(((trial, result) for trial, result, _ in self.ranked), None)

    def rungs_of(self, trial: SearchTrial) -> tuple[int, ...]:
        """The lengths of the rungs of a trial's bracket."""
        return self._brackets[trial.bracket].plan.rungs

    def length_due(self, trial: SearchTrial) -> int:
        """The length to which a trial is to be trained, or has been."""
        return self.rungs_of(trial)[trial.rung]

    def rank(self, trial: SearchTrial) -> str:
        """A trial's rank among those that have reached its rung so far: ``2nd of 9``."""
        return self._brackets[trial.bracket].rank(trial.number, trial.rung)

    def apply(self, event: SearchEvent) -> Sequence[Action]:
        """Take the next record, and return what follows from it. SearchError if it does not follow
        from the records before it, so that the log was altered."""
        self.applied += 1
        if event.number != self.applied or isinstance(event, Opened) != (event.number == 1):
            raise self._altered(event)
        self.has_no_more = isinstance(event, NoMore)
        actions: Sequence[Action] = ()
        if isinstance(event, Begun):
            self._begin(event)
        elif isinstance(event, Changed):
            self._change(event)
        elif isinstance(event, (RungReached, Exited)):
            trial = self._trial(event)
            bracket = self._brackets[trial.bracket]
            self.work.remove(Advance(trial.number, trial.rung))
            if isinstance(event, RungReached):
                trial.status = "waits"
                trial.reached.append(event)
                actions = bracket.reached(trial.number, self._value(event))
            else:
                trial.status = "invalid" if event.is_invalid else "failed"
                trial.why = text_format.one_line(event.why)
                self.invalid += event.is_invalid
                self.failed += event.is_counted and not event.is_invalid
                actions = bracket.exited(trial.number, event.is_invalid)
            self._follow(actions)
        return actions

    def _change(self, event: Changed) -> None:
        pairs = list(zip(event.plans, self._brackets, strict=False))
        is_same = len(event.plans) == len(self._brackets)
        if not is_same or not all(plan.continues(bracket.plan) for plan, bracket in pairs):
            raise self._altered(event)
        for plan, bracket in pairs:
            actions = bracket.extend(plan)
            for trial in self.trials:
                is_of_bracket = trial.status == "ended" and trial.bracket == bracket.number
                if is_of_bracket and not bracket.has_ended(trial.number):
                    trial.status, trial.why = "waits", ""
            self._follow(actions)

    def _begin(self, event: Begun) -> None:
        if event.trial != len(self.trials) or not 0 <= event.bracket < len(self._brackets):
            raise self._altered(event)
        trial = SearchTrial(event.trial, event.id, event.bracket, event.hyperparameters)
        self.trials.append(trial)
        advance = self._brackets[event.bracket].created(event.trial)
        try:
            place = self.work.index(Begin(event.bracket))
        except ValueError:
            raise self._altered(event) from None
        del self.work[place]
        self._follow(advance, place)

    def _trial(self, event: RungReached | Exited) -> SearchTrial:
        if not 0 <= event.trial < len(self.trials):
            raise self._altered(event)
        trial = self.trials[event.trial]
        is_elsewhere = isinstance(event, RungReached) and event.length != self.length_due(trial)
        if trial.status != "due" or is_elsewhere:
            raise self._altered(event)
        return trial

    def _follow(self, actions: Sequence[Action], place: int | None = None) -> None:
        """Note what follows from an event; `place`: where in `work`, by default at its end."""
        for action in actions:
            if isinstance(action, End):
                trial = self.trials[action.trial]
                trial.status, trial.why = "ended", action.why
                continue
            if isinstance(action, Advance):
                trial = self.trials[action.trial]
                trial.status, trial.rung, trial.why = "due", action.rung, action.why
                if action.rung:
                    self.promotions.append(action)
            self.work.insert(len(self.work) if place is None else place, action)

    def _value(self, result: RungReached) -> float:
        if result.metric is None:
            return math.inf
        return result.metric if self._smaller_is_better else -result.metric

    def _altered(self, event: SearchEvent) -> SearchError:
        kind = type(event).__name__.lower()
        return SearchError(
            f"the log of search {event.search} was altered: record {event.number} ({kind}) does "
            "not follow from those before it; restore it from a backup, or begin a new search"
        )


def described(state: SearchState, trial: SearchTrial, unit: str) -> str:
    """A trial's status, for people: ``waits: 2nd of 9 at 100 batches``; lengths are in `unit`."""
    if trial.status in ("failed", "invalid"):
        return f"{trial.status}: {trial.why}"
    at = f" at {in_unit(trial.reached[-1].length, unit)}" if trial.reached else ""
    if trial.status == "due":
        why = f"promoted: {trial.why}{at}" if trial.reached else trial.why
        return f"to {in_unit(state.length_due(trial), unit)} ({why})"
    if trial.status == "waits":
        return f"waits: {state.rank(trial)}{at}"
    return f"{trial.status}: {trial.why}{'' if trial.why == TO_ITS_END else at}"


def in_unit(length: int, unit: str) -> str:
    """A length, for people: ``1 epoch``, ``100 batches``."""
    return text_format.plural(length, "batch" if unit == "batches" else "epoch")


def opened(events: Sequence[SearchEvent]) -> Opened:
    """The first record. Raises SearchError if it says something else."""
    first = events[0]
    if not isinstance(first, Opened):
        raise SearchError(
            f"the log of search {first.search} was altered: its first record is not its settings"
        )
    return first


def last_settings(events: Sequence[SearchEvent]) -> dict[str, Any]:
    """The section `searcher` that counts: the last one that a driver has recorded."""
    changed = [event.searcher for event in events if isinstance(event, Changed)]
    return changed[-1] if changed else opened(events).searcher
