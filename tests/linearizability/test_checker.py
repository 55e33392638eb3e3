"""The checker: right histories have an order, wrong ones have none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.linearizability import checker, protections, registry, trials
from tests.linearizability.checker import NEVER, NotLinearizable, Operation, Undecided, check
from tests.linearizability.history import Event, check_by


def read(value: int, called: float, returned: float) -> Operation:
    """A read of a register that returned `value`."""
    return Operation(
        f"read -> {value}", lambda state: [state] if state == value else [], called, returned
    )


def write(value: int, called: float, returned: float = NEVER) -> Operation:
    """A write to a register."""
    return Operation(f"write {value}", lambda state: [value], called, returned)


def is_linearizable(*operations: Operation) -> bool:
    try:
        check(0, operations)
    except NotLinearizable:
        return False
    return True


def test_an_order_explains_the_outcomes() -> None:
    """The order keeps to calls and returns: a write that overlaps reads is between them."""
    operations = [write(1, 0, 9), read(0, 1, 2), read(1, 3, 4)]
    assert [each.text for each in check(0, operations)] == ["read -> 0", "write 1", "read -> 1"]


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param([write(1, 0, 1), read(0, 2, 3)], id="a stale read"),
        pytest.param([write(1, 0, 9), read(1, 1, 2), read(0, 3, 4)], id="back in time"),
        pytest.param([read(1, 0, 1), write(1, 2, 3)], id="before its call"),
        pytest.param(
            [write(1, 0), read(1, 1, 2), read(0, 3, 4)], id="an unknown write that is undone"
        ),
    ],
)
def test_a_wrong_history_has_no_order(operations: list[Operation]) -> None:
    """And the error shows which operation cannot follow."""
    with pytest.raises(NotLinearizable, match=r"none of these can follow:\n.*read -> [01]"):
        check(0, operations)


@pytest.mark.parametrize("seen", [[0, 0], [0, 1], [1, 1]])
def test_an_operation_that_did_not_return_may_happen_later_or_never(seen: list[int]) -> None:
    """At any time after its call."""
    first, second = seen
    assert is_linearizable(write(1, 0), read(first, 5, 6), read(second, 7, 8))


def test_it_agrees_with_a_trial_of_all_orders() -> None:
    """On small random histories."""
    choose = random.Random(7)
    verdicts = set()
    for _ in range(300):
        times = sorted(choose.random() for _ in range(10))
        history = []
        for _ in range(5):
            called, returned = sorted(times.pop(choose.randrange(len(times))) for _ in range(2))
            kind = choose.choice([read, write])
            history.append(kind(choose.randrange(2), called, returned))
        verdict = any(explains(order) for order in itertools.permutations(history))
        assert is_linearizable(*history) == verdict, history
        verdicts.add(verdict)
    assert verdicts == {True, False}


def explains(order: tuple[Operation, ...]) -> bool:
    """Whether this very order is one of time, and explains all outcomes."""
    if any(b.returned < a.called for a, b in itertools.combinations(order, 2)):
        return False
    states = [0]
    for each in order:
        states = [after for state in states for after in each.steps(state)]
    return bool(states)


def test_too_many_orders_are_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is given up with an error of its own."""
    monkeypatch.setattr(checker, "STATES_LIMIT", 100)
    with pytest.raises(Undecided):
        check(0, [*(write(each, 0, 9) for each in range(9)), read(-1, 10, 11)])


def story(*events: tuple[str, object, dict[str, object]]) -> list[Event]:
    """A history in which one operation follows another: names, outcomes and arguments."""
    return [
        Event(f"0.{number}", "key", name, arguments, outcome, 2.0 * number, 2.0 * number + 1)
        for number, (name, outcome, arguments) in enumerate(events)
    ]


def wrong_histories() -> Iterator[object]:
    one, two = {"number": 1}, {"number": 2}
    saved = {"uuid": "u", "batches": 7}
    begin = ("take_over", 1, {"after": None})
    later = ("take_over", 2, {"after": None})
    commit = ("commit", "done", {**one, **saved})
    for name, model, events in (
        ("a number twice", trials, [begin, begin]),
        ("an old attempt commits", trials, [begin, later, commit]),
        ("an old attempt announces", trials, [begin, later, ("announce", "done", one)]),
        ("a commit is not listed", trials, [begin, commit, ("list", [], {})]),
        ("a committed checkpoint is swept", trials, [begin, commit, later, ("sweep", ["u"], two)]),
        ("the newest is refused", trials, [begin, ("commit", "Superseded", {**one, **saved})]),
        ("a refused one is listed", trials, [
            begin, later, ("commit", "Superseded", {**one, **saved}), ("list", ["u"], {}),
        ]),
        ("a pinned one is pruned", protections, [("pin", "done", {}), ("prune", "deleted", {})]),
        ("a claimed one is pruned", protections, [
            ("claim", "done", {"trial": "run-1"}), ("prune", "deleted", {}),
        ]),
        ("spared for nothing", protections, [("prune", "spared", {})]),
        ("refused for nothing", protections, [("pin", "CommitConflict", {})]),
        ("a deleted one is pinned", protections, [
            ("delete", "deleted", {}), ("pin", "done", {}),
        ]),
        ("a gap", registry, [("register", 2, {"uuid": "u"})]),
        ("two champions of nothing", registry, [
            ("register", 1, {"uuid": "u"}), ("register", 2, {"uuid": "v"}),
            ("promote", [1, 1, None, "a", "promote"], {"run": "a", "number": 1, "expected": None}),
            ("promote", [1, 2, None, "b", "promote"], {"run": "b", "number": 2, "expected": None}),
        ]),
        ("the champion is pruned", registry, [
            ("register", 1, {"uuid": "u"}),
            ("promote", [1, 1, None, "a", "promote"], {"run": "a", "number": 1, "expected": "any"}),
            ("prune", ["u"], {"planned": ["u"]}),
        ]),
        ("a conflict with nobody", registry, [
            ("register", 1, {"uuid": "u"}),
            ("promote", "PromotionConflict", {"run": "a", "number": 1, "expected": "any"}),
        ]),
    ):  # fmt: skip
        yield pytest.param(model, events, id=name)


@pytest.mark.parametrize(("model", "events"), wrong_histories())
def test_a_broken_promise_is_no_history(model: object, events: list[object]) -> None:
    """Each model refuses what is not promised, and all that precedes it is allowed."""
    *before, last = story(*events)  # type: ignore[arg-type]
    if before:
        check_by(model, "key", before)
    with pytest.raises(NotLinearizable):
        check_by(model, "key", [*before, last])
