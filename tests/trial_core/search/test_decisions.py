"""A search decides as Determined's searchers, and a log that continues decides the same."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import halving_reference as reference
from tests.support.halving_reference import ReferenceBracket
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.search_ranges import grid
from trial_core.errors import SearchError, TrialflowError
from trial_core.search.halving import Advance, Begin
from trial_core.search.log import (
    Begun,
    Changed,
    Exited,
    Opened,
    RungReached,
    SearchEvent,
    SearchLog,
)
from trial_core.search.plan import (
    BracketPlan,
    adaptive_asha,
    asha,
    extended,
    rungs,
    trials_of_brackets,
)
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment
from trial_core.search.state import SearchState

QUICK = 200
LONG = 2_000
RECORD: dict[str, Any] = {"search": "s", "at": "", "by": ""}
LOSSES = (0.0, 0.25, 0.5, 0.5, 0.75, 1.0, math.nan, math.inf, -math.inf)


Loss = Callable[[int, int], float] | dict[tuple[int, int], float]


def opened() -> Opened:
    return Opened(
        number=1, experiment="e", searcher={}, hyperparameters={}, seed=0, **RECORD
    )  # fmt: skip


class Both:
    """A search and its reference, given the same events, and compared after each."""

    def __init__(
        self,
        plans: Sequence[BracketPlan],
        references: Sequence[ReferenceBracket],
        kind: str = "asha",
        stops_once: bool = False,
        smaller_is_better: bool = True,
    ) -> None:
        assert [(p.rungs, p.max_trials, p.concurrent) for p in plans] == [
            (tuple(r.lengths), r.trials, r.side_by_side) for r in references
        ]
        self.sign = 1 if smaller_is_better else -1
        self.state = SearchState(plans, kind, stops_once, smaller_is_better)
        self.references = references
        self.bracket_of: dict[int, int] = {}
        self.events: list[SearchEvent] = []
        self.queue: list[Any] = []
        for number, each in enumerate(references):
            self.queue += self._named(number, each.start())
        self._apply(opened())

    def step(self, index: int, loss: Callable[[int, int], float | str]) -> None:
        """Handle what is due at an index: begin a trial, or give its loss, or let it exit."""
        index = self.queue.index(self.queue[index])  # of new trials of a bracket, the first
        due, number = self.queue.pop(index), len(self.events) + 1
        if isinstance(due, Begin):
            trial = len(self.bracket_of)
            self.bracket_of[trial] = due.bracket
            self.references[due.bracket].create(trial)
            self.queue.insert(index, Advance(trial, 0))
            event: SearchEvent = Begun(
                number=number, trial=trial, id=f"t{trial}", bracket=due.bracket,
                hyperparameters={}, **RECORD,
            )  # fmt: skip
        else:
            trial, bracket = due.trial, self.bracket_of[due.trial]
            each = self.references[bracket]
            found = loss(trial, due.rung)
            if isinstance(found, str):
                ops = each.exit(trial) if found == "failed" else each.exit_invalid(trial)
                event = Exited(
                    number=number, trial=trial, why=found, is_invalid=found == "invalid", **RECORD
                )
            else:
                ops = each.result(trial, self.sign * found)
                event = RungReached(
                    number=number, trial=trial, length=each.lengths[due.rung], batches=1,
                    metric=found if math.isfinite(found) else None, checkpoint=None, **RECORD,
                )  # fmt: skip
            self.queue += self._named(bracket, ops)
        self._apply(event)

    def _named(self, bracket: int, ops: Sequence[Any]) -> list[Any]:
        return [Begin(bracket) if each == "create" else Advance(*each) for each in ops]

    def _apply(self, event: SearchEvent) -> None:
        self.events.append(event)
        self.state.apply(event)
        assert self.state.work == self.queue
        ended = {each.number for each in self.state.trials if each.status == "ended"}
        assert ended == {trial for each in self.references for trial in each.closed}
        progress = sum(each.progress() for each in self.references) / len(self.references)
        assert self.state.progress == pytest.approx(progress if self.queue else 1.0)


def apply_all(state: SearchState, events: Sequence[SearchEvent]) -> None:
    for event in events:
        state.apply(event)


def losses(chance: random.Random, exits: float) -> Callable[[int, int], float | str]:
    """Losses, many of them equal, some not finite; a share of the trials exits."""
    choices = LOSSES if chance.random() < 0.5 else tuple(chance.random() for _ in range(50))

    def loss(trial: int, rung: int) -> float | str:
        if chance.random() < exits:
            return chance.choice(("failed", "invalid"))
        return chance.choice(choices)

    return loss


def random_search(seed: int) -> Both:
    """A search and its reference, with random settings."""
    chance = random.Random(seed)
    divisor = chance.choice((2, 3, 4, 1.5, 2.7, 5))
    longest = chance.choice((1, 7, 16, 100, 900, 9000))
    trials, concurrent = chance.randint(1, 40), chance.choice((0, 1, 2, 3, 5, 16))
    stops_once, smaller = chance.random() < 0.4, chance.random() < 0.5
    kind = chance.choice(("random", "grid", "asha", "asha", "adaptive_asha", "adaptive_asha"))
    if kind == "adaptive_asha":
        counts = chance.choice(((), (), [1, 3, 2], [2, 2]))
        mode = chance.choice(("aggressive", "standard", "conservative"))
        most = chance.randint(1, 5)
        plans = adaptive_asha(most, divisor, longest, trials, concurrent, mode, counts)  # type: ignore[arg-type]
        others = reference.adaptive_asha(
            most, divisor, longest, trials, concurrent, mode, counts, stops_once=stops_once
        )
    else:
        count = chance.randint(1, 5) if kind == "asha" else 1
        concurrent = concurrent or (0 if kind == "asha" else trials)
        plans = [asha(count, divisor, longest, trials, concurrent)]
        others = [
            reference.asha(
                count, divisor, longest, trials, concurrent, stops_once=stops_once,
                is_grid=kind == "grid", is_full=kind in ("random", "grid"),
            )
        ]  # fmt: skip
    return Both(plans, others, kind, stops_once, smaller)


def run(both: Both, seed: int) -> None:
    """Events in random order until nothing is due."""
    chance = random.Random(seed)
    loss = losses(chance, chance.choice((0, 0.1, 0.5)))
    for _ in range(5_000):
        if not both.queue:
            return
        both.step(chance.randrange(len(both.queue)), loss)
    raise AssertionError("the search does not end")


def check_histories(seeds: range) -> None:
    for seed in seeds:
        try:
            run(random_search(seed), seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error


def test_decisions_are_determineds() -> None:
    """On random histories: who continues, who ends, when trials begin, and the progress."""
    check_histories(range(QUICK))


@pytest.mark.long
def test_decisions_are_determineds_on_more_histories() -> None:
    """The same, on 2,000."""
    check_histories(range(QUICK, QUICK + LONG))


# ------------------------------------------------------------------- Determined's own test tables


@pytest.mark.parametrize(
    ("count", "longest", "divisor", "expected"),
    [
        (3, 9, 3, (1, 3, 9)), (4, 10, 2, (1, 2, 5, 10)), (1, 9, 3, (9,)),
        (3, 900, 3, (100, 300, 900)), (3, 12, 3, (1, 4, 12)),
        (3, 576000, 3, (64000, 192000, 576000)),
    ],
)  # fmt: skip
def test_lengths_of_rungs(
    count: int, longest: int, divisor: float, expected: tuple[int, ...]
) -> None:
    """Each is a divisor times as long as the one below, rounded down."""
    assert rungs(count, divisor, longest) == expected


@pytest.mark.parametrize(
    ("trials", "divisor", "counts", "expected"),
    [
        (20, 3, [3, 2, 1], [12, 5, 3]), (50, 3, [4, 3], [35, 15]),
        (50, 4, [3, 2], [37, 13]), (100, 4, [4, 3, 2], [70, 22, 8]),
    ],
)  # fmt: skip
def test_trials_of_brackets(
    trials: int, divisor: float, counts: list[int], expected: list[int]
) -> None:
    """About equal work for each."""
    assert trials_of_brackets(counts, divisor, trials) == expected


@pytest.mark.parametrize(
    ("concurrent", "divisor", "trials", "expected"),
    [(0, 3, 13, [3, 3, 3]), (11, 3, 13, [4, 4, 3]), (0, 4, 50, [13, 13])],
)
def test_trials_side_by_side(
    concurrent: int, divisor: float, trials: int, expected: list[int]
) -> None:
    """Divided evenly; by default, as many as the last bracket has."""
    counts = [3, 2, 1][: len(expected)]
    plans = adaptive_asha(5, divisor, 900, trials, concurrent, "standard", counts)
    assert [plan.concurrent for plan in plans] == [
        min(side, plan.max_trials) for side, plan in zip(expected, plans, strict=True)
    ]


def one_by_one(plans: list[BracketPlan], values: dict[int, float | str], **kind: Any) -> list[Any]:
    """The rungs that each trial reaches: a trial is trained at a time, in the order of the work."""
    state = SearchState(plans, kind.pop("name", "asha"), **kind)
    state.apply(opened())
    number = 1
    while state.work:
        work, number = state.work[0], number + 1
        if isinstance(work, Begin):
            trial = len(state.trials)
            state.apply(
                Begun(
                    number=number, trial=trial, id="t", bracket=work.bracket, hyperparameters={},
                    **RECORD,
                )
            )  # fmt: skip
            continue
        value = values[work.trial]
        length = state.length_due(state.trials[work.trial])
        if isinstance(value, str) and int(value.split("@")[1]) == length:
            state.apply(Exited(number=number, trial=work.trial, why="", **RECORD))
            continue
        metric = float(value.split("@")[0]) if isinstance(value, str) else value
        state.apply(
            RungReached(
                number=number, trial=work.trial, length=length, batches=length, metric=metric,
                checkpoint=None, **RECORD,
            )
        )  # fmt: skip
    return [[each.length for each in trial.reached] for trial in state.trials]


FULL = [1000, 3000, 9000]
RISING = {i: 0.01 * (i + 1) for i in range(12)}


def test_the_constant_metric() -> None:
    """Of 12 equal trials, 8 end at the first rung, 3 at the second, one at the last."""
    ends = sorted(map(len, one_by_one([asha(3, 3, 9000, 12, 0)], dict.fromkeys(range(12), 1.0))))
    assert ends == [1] * 8 + [2] * 3 + [3]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exits", [False, True])
def test_rising_losses(sign: int, exits: bool) -> None:
    """The first is trained to its end, three more to the second rung; one may exit there."""
    values: dict[int, Any] = {i: sign * each for i, each in RISING.items()}
    if exits:
        values[2] = f"{values[2]}@3000"
    reached = one_by_one([asha(3, 3, 9000, 12, 0)], values, smaller_is_better=sign == 1)
    assert reached == [FULL, FULL[:2], FULL[:1] if exits else FULL[:2], FULL[:2], *[FULL[:1]] * 8]


def test_asynchronous_promotions() -> None:
    """A trial is promoted by the results so far, though later ones are better."""
    values: dict[int, Any] = {0: 0.10, 1: 0.11, 2: "0.12@1000"}
    values |= {i: 0.01 * (i - 2) for i in range(3, 12)}
    reached = one_by_one([asha(3, 3, 9000, 12, 3)], values)
    assert reached[0] == FULL[:2]
    assert reached[1] == FULL[:1]
    assert reached[2] == []
    assert reached[3] == FULL


@pytest.mark.parametrize("exits", [False, True])
def test_adaptive_brackets(exits: bool) -> None:
    """Three trials with two rungs, of which one continues, and two with one rung."""
    values: dict[int, Any] = {i: 0.1 * (i + 1) for i in range(5)}
    if exits:
        values[1] = "0.2@300"
    plans = adaptive_asha(2, 3, 900, 5, 5, "standard")
    assert one_by_one(plans, values) == [
        [300, 900], [] if exits else [300], [300], [900], [900],
    ]  # fmt: skip


@pytest.mark.parametrize("concurrent", [2, 3])
def test_stopping_with_rising_losses(concurrent: int) -> None:
    """Only the first is ever the best of its rung."""
    reached = one_by_one([asha(3, 3, 9000, 12, concurrent)], dict(RISING), stops_once=True)
    assert reached == [FULL, *[FULL[:1]] * 11]


def test_stopping_with_falling_losses() -> None:
    """Each is the best of its rung when it comes, so all are trained to their end."""
    falling = {i: -each for i, each in RISING.items()}
    assert one_by_one([asha(3, 3, 9000, 12, 1)], dict(falling), stops_once=True) == [FULL] * 12


def test_one_rung() -> None:
    """Every trial is trained to its end."""
    assert one_by_one([asha(1, 3, 9000, 4, 0)], RISING) == [[9000]] * 4


def test_points_of_grids() -> None:
    """Their order, their ends, and a half that is rounded away from zero."""
    ints = {"type": "int", "minval": 0, "maxval": 20, "count": 3}
    nested = {"2": {"3": ints | {"maxval": 10}}, "1": ints}
    assert [(p["1"], p["2"]["3"]) for p in grid(nested)] == [
        (a, b) for a in (0, 10, 20) for b in (0, 5, 10)
    ]
    assert grid({"a": {"type": "int", "minval": -4, "maxval": -2, "count": 9}}) == [
        {"a": -4}, {"a": -3}, {"a": -2},
    ]  # fmt: skip
    for lowest, highest, count, expected in (
        (-5, 0, 3, [-5, -3, 0]), (0, 5, 3, [0, 3, 5]), (1, 2, 1, [2]), (-2, -1, 1, [-2]),
        (0, 7, 4, [0, 2, 5, 7]),
    ):  # fmt: skip
        points = grid({"a": {"type": "int", "minval": lowest, "maxval": highest, "count": count}})
        assert [point["a"] for point in points] == expected
    double = {"type": "double", "minval": -1.0, "maxval": 1.0, "count": 4}
    assert [p["a"] for p in grid({"a": double})] == [-1 + i * 2 / 3 for i in range(4)]
    log = {"type": "log", "base": 2, "minval": -3, "maxval": -1, "count": 1}
    assert grid({"a": log, "b": {"type": "categorical", "vals": [7, 8]}}) == [
        {"a": 0.25, "b": 7}, {"a": 0.25, "b": 8},
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ PASHA


def pasha(seed: int) -> tuple[SearchState, SearchState]:
    """PASHA and ASHA on the same results, a trial at a time."""
    chance = random.Random(seed)
    plan = asha(chance.randint(2, 5), chance.choice((2, 3, 4)), 1000, chance.randint(2, 40), 1)
    noise = chance.choice((0.0, 0.1, 1.0))
    found = {(t, r): t * 7 % 11 + noise * chance.gauss(0, 5) for t in range(60) for r in range(6)}
    states = []
    for kind in ("pasha", "asha"):
        both = SearchState([plan], kind)
        run_alone(both, lambda trial, rung: found[trial, rung])
        states.append(both)
    return states[0], states[1]


def run_alone(state: SearchState, loss: Callable[[int, int], float]) -> list[SearchEvent]:
    """Train a trial at a time until nothing is due; the records."""
    events: list[SearchEvent] = [opened()]
    state.apply(events[0])
    while state.work:
        events.append(next_event(state, len(events) + 1, 0, loss))
        state.apply(events[-1])
    return events


def next_event(state: SearchState, number: int, index: int, loss: Loss) -> SearchEvent:
    work = state.work[index]
    if isinstance(work, Begin):
        return Begun(
            number=number, trial=len(state.trials), id="t", bracket=work.bracket,
            hyperparameters={}, **RECORD,
        )  # fmt: skip
    length = state.length_due(state.trials[work.trial])
    value = loss[work.trial, work.rung] if isinstance(loss, dict) else loss(work.trial, work.rung)
    return RungReached(
        number=number, trial=work.trial, length=length, batches=length,
        metric=value if math.isfinite(value) else None, checkpoint=None, **RECORD,
    )  # fmt: skip


def trained(state: SearchState) -> int:
    return sum(trial.reached[-1].length for trial in state.trials)


def test_pasha_trains_at_most_what_asha_trains() -> None:
    """On the same results; and both begin all trials."""
    fewer = 0
    for seed in range(QUICK):
        progressive, plain = pasha(seed)
        assert len(progressive.trials) == len(plain.trials)
        assert trained(progressive) <= trained(plain), seed
        fewer += trained(progressive) < trained(plain)
    assert fewer > QUICK // 4


def test_pasha_grows_only_while_the_order_changes() -> None:
    """With one order at all rungs no trial passes the second; with another one, some do."""
    plan = asha(5, 2, 64, 32, 4)
    same = SearchState([plan], "pasha")
    run_alone(same, lambda trial, rung: trial * 7 % 32)
    assert max(trial.rung for trial in same.trials) == 1
    other = SearchState([plan], "pasha")
    run_alone(other, lambda trial, rung: trial * 7 % 32 * (-1) ** rung)
    assert max(trial.rung for trial in other.trials) == 4


# ------------------------------------------------------------------------------- greater maxima


@pytest.mark.parametrize("kind", ["random", "grid", "asha", "stop_once", "adaptive_asha", "pasha"])
def test_greater_maxima_change_no_decision(kind: str) -> None:
    """At any place of a log: what is recorded stays, and the search ends with the new maxima."""
    for seed in range(QUICK // 4):
        chance = random.Random(f"{kind} {seed}")
        divisor, longest, trials = chance.choice((1.1, 2, 3)), chance.choice((1, 5, 90)), 7
        plans = (
            adaptive_asha(3, divisor, longest, trials, 5, "conservative")
            if kind == "adaptive_asha"
            else [asha(1 if kind in ("random", "grid") else 3, divisor, longest, trials, 3)]
        )
        found = {(trial, rung): chance.random() for trial in range(99) for rung in range(99)}
        state = SearchState(plans, kind, kind == "stop_once")
        events: list[SearchEvent] = [opened()]
        state.apply(events[0])
        changes = sorted(chance.sample(range(1, 40), 2))
        while state.work or changes:
            if changes and (len(events) > changes[0] or not state.work):
                changes.pop(0)
                longest, trials = longest * chance.choice((1, 2, 5)), trials + chance.randint(0, 9)
                before = places(state)
                new = extended(state.plans, divisor, longest, trials, chance.choice((0, 2, 6)))
                events.append(Changed(number=len(events) + 1, searcher={}, plans=new, **RECORD))
                state.apply(events[-1])
                assert before == places(state)
                assert sum(plan.max_trials for plan in new) == trials
                assert {plan.rungs[-1] for plan in new} == {longest}
            else:
                at = chance.randrange(len(state.work))
                events.append(next_event(state, len(events) + 1, at, found))
                state.apply(events[-1])
        assert len(state.trials) == trials
        assert {trial.status for trial in state.trials} == {"ended"}
        if kind in ("random", "grid"):
            assert {trial.reached[-1].length for trial in state.trials} == {longest}
        check_replay(plans, kind, events, state)


def places(state: SearchState) -> list[Any]:
    """Each trial's number, bracket and results."""
    return [(trial.number, trial.bracket, list(trial.reached)) for trial in state.trials]


def check_replay(
    plans: Sequence[BracketPlan], kind: str, events: Sequence[SearchEvent], state: SearchState
) -> None:
    again = SearchState(plans, kind, kind == "stop_once")
    apply_all(again, events)
    assert (again.trials, again.work, again.progress) == (state.trials, state.work, state.progress)


def test_trials_that_failed_are_not_trained_when_all_continue() -> None:
    """A random search with a greater length: those that failed count as the worst there."""
    state = SearchState([asha(1, 4, 10, 3, 3)], "random")
    events: list[SearchEvent] = [opened()]
    state.apply(events[0])
    for index in range(3):
        state.apply(next_event(state, index + 2, index, lambda *_: 1.0))
    state.apply(Exited(number=5, trial=0, why="", **RECORD))
    for number in (6, 7):
        state.apply(next_event(state, number, 0, lambda *_: 1.0))
    plans = extended(state.plans, 4, 20, 3, 3)
    state.apply(Changed(number=8, searcher={}, plans=plans, **RECORD))
    assert state.work == [Advance(1, 1), Advance(2, 1)]
    assert [trial.status for trial in state.trials] == ["failed", "due", "due"]


# ------------------------------------------------------------------------------------- the log


def test_a_prefix_and_the_rest_are_the_whole() -> None:
    """After every record, a state from the log so far continues as one that never stopped."""
    for seed in range(QUICK // 10):
        both = random_search(seed)
        plans, kind = both.state.plans, random_kind(both)
        run(both, seed)
        for cut in range(len(both.events)):
            state = SearchState(plans, *kind)
            apply_all(state, both.events[:cut])
            apply_all(state, both.events[cut:])
            assert state.trials == both.state.trials
            assert state.work == both.state.work


def random_kind(both: Both) -> tuple[str, bool, bool]:
    each = both.references[0]
    kind = "grid" if each.is_grid else "random" if each.is_full else "asha"
    return kind, each.stops_once, both.sign == 1


@pytest.mark.parametrize("seed", range(40))
def test_an_altered_log_is_refused(seed: int) -> None:
    """Records removed, repeated, exchanged or altered: SearchError, or a state that follows."""
    chance = random.Random(seed)
    both = random_search(seed)
    plans, kind = both.state.plans, random_kind(both)
    run(both, seed)
    for _ in range(10):
        events = list(both.events)
        at, other = chance.randrange(len(events)), chance.randrange(len(events))
        how = chance.choice(("remove", "repeat", "exchange", "alter"))
        if how == "remove":
            del events[at]
        elif how == "repeat":
            events.insert(at, events[other])
        elif how == "exchange":
            events[at], events[other] = events[other], events[at]
        else:
            events[at] = altered(chance, events[at])
        if how == "exchange":
            events = [msgspec.structs.replace(each, number=i) for i, each in enumerate(events, 1)]
        state = SearchState(plans, *kind)
        try:
            apply_all(state, events)
        except SearchError:
            continue
        assert [trial.number for trial in state.trials] == list(range(len(state.trials)))
        assert how in ("exchange", "alter") or at == len(events)  # the last one was removed


def altered(chance: random.Random, event: SearchEvent) -> SearchEvent:
    """A record with another value of one field, of the same type."""
    name = chance.choice([name for name in event.__struct_fields__ if name not in RECORD])
    value = getattr(event, name)
    if isinstance(value, bool):
        return msgspec.structs.replace(event, **{name: not value})
    if isinstance(value, int):
        return msgspec.structs.replace(event, **{name: chance.choice((-1, 0, value + 1, 10**9))})
    return event


@pytest.mark.parametrize(
    "plans",
    [
        [],
        [BracketPlan((10,), 9, 3, 4.0)] * 2,
        [BracketPlan((10, 5), 9, 3, 4.0)],
        [BracketPlan((10, 10), 9, 3, 4.0)],
        [BracketPlan((9,), 9, 3, 4.0)],
        [BracketPlan((10, 20), 8, 3, 4.0)],
        [BracketPlan((10, 20), 9, 0, 4.0)],
        [BracketPlan((10, 20), 9, 3, 0.0)],
        [BracketPlan((), 9, 3, 4.0)],
    ],
)
def test_other_brackets_are_refused(plans: list[BracketPlan]) -> None:
    """A record of greater maxima that changes more than these."""
    state = SearchState([BracketPlan((10,), 9, 3, 4.0)], "asha")
    state.apply(opened())
    with pytest.raises(SearchError, match="was altered: record 2"):
        state.apply(Changed(number=2, searcher={}, plans=plans, **RECORD))


@pytest.mark.parametrize("seed", range(6))
def test_altered_objects_of_a_log_are_refused(tmp_path: Path, seed: int) -> None:
    """A stored value of another type or size: an error of ours, or a search that continues."""
    chance = random.Random(seed)
    of = SearchExperiment.from_mapping(
        {
            "name": "toy", "entrypoint": "m:Trial",
            "hyperparameters": {"x": {"type": "int", "minval": 1, "maxval": 9}},
            "searcher": {
                "name": "asha", "metric": "loss", "max_length": {"batches": 8}, "max_trials": 3,
                "num_rungs": 2, "divisor": 2, "smaller_is_better": True,
            },
        }
    )  # fmt: skip
    storage = CheckpointStore(f"file://{tmp_path}/checkpoints").storage
    search = Search(of, SearchLog(storage, "toy-search-0000beef"), "toy-search-0000beef")
    while (leg := search.next(())) is not None:
        search.reached(leg, 1, {"loss": leg.trial.number}, None)
    files = sorted(tmp_path.rglob("00*.json"))
    assert len(files) > 6
    refused = 0
    for _ in range(25):
        file = chance.choice((files[0], *files))
        before = file.read_text()
        record = json.loads(before)
        inside = record["searcher"] if "searcher" in record and chance.random() < 0.8 else record
        name = chance.choice(sorted(inside))
        inside[name] = chance.choice((None, -1, 0, 2**40, "x", [], {}, {"batches": "x"}, [3], True))
        file.chmod(0o644)
        file.write_text(json.dumps(record))
        try:
            Search(of, SearchLog(storage, "toy-search-0000beef"), "toy-search-0000beef")
        except TrialflowError:
            refused += 1
        file.write_text(before)
        for extra in set(tmp_path.rglob("00*.json")) - {*files}:
            extra.unlink()  # the record of greater maxima, where an altered one was smaller
    assert refused > 5
