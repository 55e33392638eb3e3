"""Checks whether a history of concurrent operations is linearizable.

A history is linearizable if every operation can be given one moment between its call and its
return, so that a sequential model, which takes the operations in the order of these moments,
allows what each of them returned. The search is that of Wing and Gong with Lowe's memory of what
has been tried, as in porcupine: a depth-first search over pairs of the operations done so far and
the model's state.

The model may allow several states after an operation. An operation that never returned (its process
was killed, the storage failed after the request was sent) may have its moment at any time after its
call, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STATES_LIMIT = 2_000_000

NEVER = math.inf
"""The time of return of an operation that did not return."""

Steps = Callable[[Any], Iterable[Any]]
"""The model's states after an operation with a known outcome; none: it cannot have that outcome."""


@dataclass(frozen=True)
class Operation:
    """An operation, or a part of one that has a moment of its own.

    Attributes:
        text: for people.
        steps: what the model says.
        called, returned: times by one clock for all processes.
    """

    text: str
    steps: Steps
    called: float
    returned: float


class Undecided(Exception):
    """The search was given up: the history has too many possible orders."""


class NotLinearizable(AssertionError):
    """No order of the operations explains the history."""


def check(initial: Hashable, operations: Iterable[Operation]) -> list[Operation]:
    """An order of the operations that explains all outcomes.

    Args:
        initial: the model's first state.

    Raises:
        NotLinearizable: there is none; shows the longest order, and what cannot follow.
        Undecided: more than `STATES_LIMIT` pairs were tried.
    """
    history = sorted(operations, key=lambda each: each.called)
    needed = sum(1 << index for index, each in enumerate(history) if each.returned != NEVER)
    start = (0, initial)
    came_from: dict[Any, tuple[Any, int]] = {start: (None, -1)}
    stack: list[tuple[int, Any]] = [start]
    longest = start
    while stack:
        node = stack.pop()
        done, state = node
        if done & needed == needed:
            return _order(history, came_from, node)
        if (done & needed).bit_count() > (longest[0] & needed).bit_count():
            longest = node
        # Last pushed, first tried: the operation that returned first, those of no return at last.
        for index in sorted(_next(history, done), key=lambda i: history[i].returned, reverse=True):
            for after in history[index].steps(state):
                follower = (done | 1 << index, after)
                if follower not in came_from:
                    came_from[follower] = (node, index)
                    stack.append(follower)
        if len(came_from) > STATES_LIMIT:
            raise Undecided(f"{len(came_from)} states of {len(history)} operations tried")
    raise NotLinearizable(_explain(history, _order(history, came_from, longest), longest))


def _next(history: Sequence[Operation], done: int) -> list[int]:
    """The operations that may be next: called before any other one that is not done returned."""
    left = [index for index in range(len(history)) if not done >> index & 1]
    deadline = min(history[index].returned for index in left)
    return [index for index in left if history[index].called <= deadline]


def _order(history: Sequence[Operation], came_from: Any, node: Any) -> list[Operation]:
    order = []
    while node is not None:
        node, index = came_from[node]
        if node is not None:
            order.append(history[index])
    return order[::-1]


def _explain(history: Sequence[Operation], order: Sequence[Operation], end: Any) -> str:
    start = history[0].called
    stuck = [history[index] for index in _next(history, end[0])]

    def shown(operations: Iterable[Operation]) -> str:
        return "\n".join(
            f"  {each.called - start:9.4f} - {each.returned - start:9.4f}  {each.text}"
            for each in operations
        )

    return (
        f"no order explains these {len(history)} operations (seconds from call to return):\n"
        f"{shown(history)}\nthe longest order found:\n{shown(order)}\nends in {end[1]}\n"
        f"and none of these can follow:\n{shown(stuck)}"
    )
