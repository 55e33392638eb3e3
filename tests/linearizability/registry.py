"""A model of the registry: register, promote, rollback, and prunes beside them.

What is promised (`models.registry`, `models.promotion`), and so the model:

- A checkpoint becomes the next version once; numbers have no gaps.
- A promotion that returned a move made it in one moment, in which the champion was the expected
  one. It is refused as a conflict only if the champion is another one, or another process has moved
  the aliases meanwhile.
- A rollback makes the previous champion of its one moment the champion.
- No prune deletes the checkpoint of champion or previous. (A prune may spare others: holds of
  promotions that lost, or whose process was killed.)
"""

from __future__ import annotations

import random
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tests.linearizability.checker import Steps
from tests.linearizability.history import Event, Recorder
from tests.linearizability.protections import KEEP_NONE
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError
from trial_core.models.records import Move
from trial_core.models.registry import ANY, Registry


class Model(NamedTuple):
    """The state of a model.

    Attributes:
        versions: uuids of the versions' checkpoints, by number.
        move: number of the last move, its champion, previous, run and kind.
        gone: the checkpoints that are deleted.
        deleting: prunes in progress, or of which the process was killed.
        looked: for each operation that was refused as a conflict, the number of the last move at
            a moment after its call.
    """

    versions: tuple[str, ...] = ()
    move: tuple[int, int | None, int | None, str, str] = (0, None, None, "", "")
    gone: frozenset[str] = frozenset()
    deleting: frozenset[str] = frozenset()
    looked: frozenset[tuple[str, int]] = frozenset()

    @property
    def needed(self) -> set[str]:
        """The checkpoints that no prune may delete."""
        return {self.versions[number - 1] for number in self.move[1:3] if number is not None}


def initial(key: str) -> Model:
    """The first state."""
    return Model()


def parts(event: Event) -> Iterable[tuple[str, Steps]]:
    """The moments of an operation."""
    if event.name == "register":
        return [("", partial(_register, event))]
    if event.name in ("promote", "rollback"):
        look = [("(look)", partial(_look, event))] if event.outcome == "PromotionConflict" else []
        return [*look, ("", partial(_move, event))]
    if event.name == "prune":
        uuids = event.outcome if event.is_known else event.arguments["planned"]
        return [
            ("(mark)", lambda model: [model._replace(deleting=model.deleting | {event.id})]),
            *((f"(delete {uuid})", partial(_delete, event, uuid)) for uuid in uuids),
            *([("", partial(_end_prune, event))] if event.is_known else []),
        ]
    return [("", partial(_read, event))] if event.is_known else []


def _register(event: Event, model: Model) -> Iterator[Model]:
    uuid = event.arguments["uuid"]
    if event.outcome == "CheckpointNotFound":
        if uuid in model.gone:
            yield model
        return
    after = model if uuid in model.versions else model._replace(versions=(*model.versions, uuid))
    if event.outcome in (None, after.versions.index(uuid) + 1):
        yield after


def _look(event: Event, model: Model) -> Iterator[Model]:
    yield model._replace(looked=model.looked | {(event.id, model.move[0])})


def _move(event: Event, model: Model) -> Iterator[Model]:
    refusals: dict[str, Callable[[Event, Model], bool]] = {
        "PromotionConflict": _is_conflict,
        "PromotionRefused": lambda event, model: bool(model.deleting) or (
            event.name == "rollback" and model.move[2] is None
        ),
        "CheckpointNotFound": _is_gone,
        "ModelNotFound": lambda event, model: not model.versions,
    }  # fmt: skip
    if isinstance(event.outcome, str):
        if event.outcome in refusals and refusals[event.outcome](event, model):
            yield model._replace(
                looked=frozenset(each for each in model.looked if each[0] != event.id)
            )
        return
    for after in _moved(event, model):
        if event.outcome is None or tuple(event.outcome) == after.move:
            yield after


def _is_gone(event: Event, model: Model) -> bool:
    if event.name == "promote":
        return model.versions[event.arguments["number"] - 1] in model.gone
    return bool(model.gone)  # the one that was previous when the rollback began


def _is_conflict(event: Event, model: Model) -> bool:
    expected = event.arguments.get("expected", "any")
    is_unexpected = expected not in ("any", model.move[1])
    looked = [number for id, number in model.looked if id == event.id]
    return bool(looked) and (is_unexpected or model.move[0] > looked[0])


def _moved(event: Event, model: Model) -> Iterator[Model]:
    """The states after a move that succeeds."""
    number, champion, previous, run, kind = model.move
    wanted = event.arguments.get("number", previous)
    expected = event.arguments.get("expected", "any")
    is_own = kind == event.name and run == event.arguments["run"]
    if event.name == "promote" and champion == wanted and (is_own or expected in ("any", champion)):
        yield model
        return
    if event.name == "rollback" and is_own:
        yield model
        return
    is_version = wanted is not None and wanted <= len(model.versions)
    if not is_version or model.versions[wanted - 1] in model.gone:
        return
    if expected in ("any", champion):
        yield model._replace(
            move=(number + 1, wanted, champion, event.arguments["run"], event.name)
        )


def _delete(event: Event, uuid: str, model: Model) -> Iterator[Model]:
    if event.id in model.deleting and (uuid in model.gone or uuid not in model.needed):
        yield model._replace(gone=model.gone | {uuid})


def _end_prune(event: Event, model: Model) -> Iterator[Model]:
    is_list = isinstance(event.outcome, list)
    if is_list and event.id in model.deleting and model.gone >= set(event.outcome):
        yield model._replace(deleting=model.deleting - {event.id})


def _read(event: Event, model: Model) -> Iterator[Model]:
    seen: dict[str, Any] = {
        "versions": list(model.versions),
        "champion": model.move[1],
        "last_move": list(model.move),
    }
    if event.outcome == seen[event.name]:
        yield model


class Actor:
    """A process that moves a model's aliases at random."""

    def __init__(
        self, store: CheckpointStore, recorder: Recorder, choose: random.Random, process: int
    ) -> None:
        self._store, self._recorder, self._choose = store, recorder, choose
        self._registry = Registry(store)
        self._uncertain: list[dict[str, Any]] = []
        self._versions = 0

    def act(self, keys: list[str]) -> None:
        """Do one operation."""
        (key,) = keys
        kinds = [self._promote, self._promote, self._promote, self._rollback, self._rollback]
        if not self._versions:
            kinds = [self._register]
        self._choose.choice([*kinds, self._register, self._prune, self._read, self._read])(key)

    def _register(self, key: str) -> None:
        try:
            manifest = self._choose.choice(self._store.list())
        except (CheckpointError, IndexError):
            return
        outcome = self._recorder.call(
            "register",
            key,
            lambda: (
                self._registry.register(
                    key, manifest, metric=None, smaller_is_better=True, value=None
                ).number
            ),
            uuid=manifest.uuid,
        )
        if isinstance(outcome, int):
            self._versions = max(self._versions, outcome)

    def _promote(self, key: str) -> None:
        if self._uncertain:
            self._move(key, **self._uncertain.pop())
            return
        number = self._choose.randint(1, self._versions)
        expected = self._choose.choice(["any", "any", None, *range(1, self._versions + 1)])
        self._move(key, number=number, expected=expected, run=uuids.uuid4().hex[:8])

    def _rollback(self, key: str) -> None:
        self._move(key, run=uuids.uuid4().hex[:8])

    def _move(self, key: str, run: str, number: int | None = None, **arguments: Any) -> None:
        def move() -> tuple[Any, ...]:
            if number is None:
                return _shown(self._registry.rollback(key, run=run))
            expected = arguments["expected"]
            return _shown(
                self._registry.promote(
                    key, number, run=run, expected_champion=ANY if expected == "any" else expected
                )
            )

        given = {"run": run, **arguments, **({} if number is None else {"number": number})}
        name = "rollback" if number is None else "promote"
        if self._recorder.call(name, key, move, **given) is None:
            self._uncertain.append({"number": number, **given})

    def _prune(self, key: str) -> None:
        try:
            manifests = self._store.list()
            if not manifests:
                return
            experiment, trial = manifests[0].experiment, manifests[0].trial
            plan = plan_pruning(self._store, KEEP_NONE, experiment, trial=trial)
        except CheckpointError:
            return
        planned = [each.manifest.uuid for each in plan.deletions]

        def carry_out() -> list[str]:
            return [each.uuid for each in prune(self._store, plan).deleted]

        self._recorder.call("prune", key, carry_out, planned=planned)

    def _read(self, key: str) -> None:
        kind = self._choose.choice(["versions", "champion", "last_move"])

        def read() -> Any:
            if kind == "versions":
                return [each.checkpoint for each in self._registry.versions(key)]
            if kind == "champion":
                champion = self._registry.champion(key)
                return None if champion is None else champion.number
            return _shown(self._registry.last_move(key))

        self._recorder.call(kind, key, read)


def _shown(move: Move | None) -> tuple[Any, ...]:
    if move is None:
        return Model().move
    return (move.number, move.champion, move.previous, move.run, move.kind)
