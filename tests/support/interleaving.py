"""Two actors on one storage, whose requests follow each other in an order that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from trial_core.checkpoint.store import CheckpointStore

VERBS = frozenset({"read", "create", "write", "sizes", "delete", "remove", "clear"})
"""What waits for its turn: a request, or several that another actor is not let in between."""
LIMIT_SECONDS = 30.0


class _Turns:
    """A storage of which every request waits until it is told to go on."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.news = threading.Semaphore(0)  # a request waits, or all is over
        self.go = threading.Semaphore(0)
        self.waiting = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if name not in VERBS:
            return attribute

        def in_turn(*arguments: Any, **named: Any) -> Any:
            self.waiting += 1
            self.news.release()
            self.go.acquire(timeout=LIMIT_SECONDS)
            self.waiting -= 1
            return attribute(*arguments, **named)

        return in_turn


class _Actor:
    def __init__(self, url: str, act: Callable[[CheckpointStore], Any]) -> None:
        self._store = CheckpointStore(url)
        self._turns = _Turns(self._store.storage)
        self._store.storage = self._turns  # type: ignore[assignment]  # the same verbs
        self._act = act
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.has_ended = False
        self.outcome: Any = None

    def start(self) -> None:
        self._thread.start()
        self._turns.news.acquire(timeout=LIMIT_SECONDS)

    def step(self) -> None:
        """Carry out one request, up to the next one."""
        self._turns.go.release()
        self._turns.news.acquire(timeout=LIMIT_SECONDS)

    def _run(self) -> None:
        try:
            self.outcome = self._act(self._store)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error
        self.has_ended = True
        self._turns.news.release()


def interleave(
    url: str,
    first: Callable[[CheckpointStore], Any],
    second: Callable[[CheckpointStore], Any],
    order: Iterable[bool],
) -> tuple[Any, Any]:
    """Run both; what each returned or raised.

    Args:
        order: whose request is next: False the first's, True the second's. When it is at its end,
            or an actor at its own, the rest follows.
    """
    actors = (_Actor(url, first), _Actor(url, second))
    for actor in actors:
        actor.start()
    turns = iter(order)
    while not all(actor.has_ended for actor in actors):
        chosen = actors[next(turns, False)]
        (chosen if not chosen.has_ended else actors[chosen is actors[0]]).step()
    return actors[0].outcome, actors[1].outcome
