"""Who has a trial: runs that take it over from each other, claim it, and leave it.

What is promised (`checkpoint.retention.trial_owner`), and so the model:

- Whoever became a trial's newest attempt has it until it leaves: the trial counts as claimed. A run
  that was taken over, and ends or goes on later, changes nothing about that.
- A trial counts as claimed only while a run has it, takes it over, or was killed.
- Weaker: a claim that the storage refuses is only warned of.
"""

from __future__ import annotations

import random
import uuid as uuids
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tests.linearizability.checker import Steps
from tests.linearizability.history import Event, Recorder
from trial_core.checkpoint.retention.claims import RunClaim, claims
from trial_core.checkpoint.store import CheckpointStore


class Owned(NamedTuple):
    """The state of a trial.

    Attributes:
        newest: number of the newest attempt.
        numbers: of the attempts, by the id of the attempt.
        having: ids of the attempts that have claimed the trial and have not left it.
        may_claim: ids of the attempts whose claim may be stored.
    """

    newest: int = 0
    numbers: frozenset[tuple[str, int]] = frozenset()
    having: frozenset[str] = frozenset()
    may_claim: frozenset[str] = frozenset()


def initial(key: str) -> Owned:
    """The first state."""
    return Owned()


def parts(event: Event) -> Iterable[tuple[str, Steps]]:
    """The moments of an operation."""
    if event.name == "own":
        return [("(take over)", partial(_take_over, event)), ("", partial(_claim, event))]
    if event.name == "leave":
        return [("", partial(_leave, event))]
    if event.name == "look" and event.is_known:
        return [("", partial(_look, event))]
    return []  # a renewal changes nothing


def _take_over(event: Event, owned: Owned) -> Iterator[Owned]:
    number, attempt = owned.newest + 1, event.arguments["attempt"]
    if isinstance(event.outcome, list) and event.outcome[0] != number:
        return
    yield owned._replace(
        newest=number,
        numbers=owned.numbers | {(attempt, number)},
        may_claim=owned.may_claim | {attempt},
    )


def _claim(event: Event, owned: Owned) -> Iterator[Owned]:
    attempt = event.arguments["attempt"]
    number = dict(owned.numbers).get(attempt, 0)
    if not number:
        return
    if event.outcome == "Superseded":
        if owned.newest > number:
            yield owned._replace(may_claim=owned.may_claim - {attempt})
            yield owned
    elif not event.is_known:
        yield owned
    elif event.outcome[0] == number:
        is_claimed = event.outcome[1]
        yield owned._replace(having=owned.having | {attempt}) if is_claimed else owned


def _leave(event: Event, owned: Owned) -> Iterator[Owned]:
    own = {event.arguments["attempt"]}
    left = owned._replace(having=owned.having - own)
    yield left._replace(may_claim=left.may_claim - own)
    yield left  # its deletion failed


def _look(event: Event, owned: Owned) -> Iterator[Owned]:
    has_owner = any((attempt, owned.newest) in owned.numbers for attempt in owned.having)
    if (event.outcome == "claimed" and owned.may_claim) or (
        event.outcome == "free" and not has_owner
    ):
        yield owned


class Actor:
    """A process that runs a trial, now and then: what it does at random."""

    def __init__(
        self, store: CheckpointStore, recorder: Recorder, choose: random.Random, process: int
    ) -> None:
        self._store, self._recorder, self._choose = store, recorder, choose
        self._run: tuple[str, RunClaim] | None = None

    def act(self, keys: list[str]) -> None:
        """Do one operation."""
        (key,) = keys
        kinds = [self._own, self._look] if self._run is None else [self._leave, self._renew]
        self._choose.choice([*kinds, self._look])(key)

    def _own(self, key: str) -> None:
        attempt = uuids.uuid4().hex
        made: list[RunClaim] = []

        def own() -> tuple[int, bool]:
            fence = self._store.take_over(key, attempt)
            claim = RunClaim(self._store, key, check=partial(fence.check, "not trained"))
            made.append(claim.__enter__())
            return fence.number, claim.is_written

        self._recorder.call("own", key, own, attempt=attempt)
        if made:
            self._run = attempt, made[0]

    def _leave(self, key: str) -> None:
        assert self._run is not None
        attempt, claim = self._run
        self._run = None
        self._recorder.call("leave", key, claim.__exit__, attempt=attempt)

    def _renew(self, key: str) -> None:
        assert self._run is not None
        attempt, claim = self._run

        def renew() -> str:
            claim.renew(self._store.resume_candidates(key)[0].name)
            return "done"

        self._recorder.call("renew", key, renew, attempt=attempt)

    def _look(self, key: str) -> None:
        self._recorder.call("look", key, lambda: "claimed" if claims(self._store, key) else "free")
