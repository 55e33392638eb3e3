"""Moving a model's aliases: `champion`, and `previous`, which was it before.

The aliases are a log; see `log`. A move holds both as they are after it, so nothing is ever half
moved; it is number n + 1 because it was decided upon move n, so of several at once one succeeds.

A champion's checkpoint must be there, and stay. So who promotes, in this order::

    P1  reads every byte of it
    P2  reads the last move, n
    P3  holds it (see `holds`), for move n + 1; looks whether it is being deleted, or gone
    P4  creates move n + 1; where it is another's by now, gives up the hold
    P5  drops the holds for moves up to n + 1 on what is neither champion nor previous

Who held for such a move and is none of these has lost, or will: its number is taken. Who holds for
a later one may be about to win. Killed anywhere, a hold too many is left; it goes with the next
move. To roll back takes no hold: `previous` has one of when it was promoted.
"""

from __future__ import annotations

import enum
import logging
import uuid as uuids
from dataclasses import dataclass
from typing import Final, Literal

from trial_core.checkpoint.json_objects import user_at_host
from trial_core.checkpoint.layout import ManifestName
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CommitConflict,
    PromotionConflict,
    PromotionRefused,
    RegistryError,
    StorageError,
)
from trial_core.models.numbered_log import NumberedLog
from trial_core.models.records import Kind, Move, Version
from trial_core.retention.holds import RegistryHold, hold, holds

_logger = logging.getLogger(__name__)


class AnyChampion(enum.Enum):
    """Whoever is champion."""

    ANY = "any"


ANY: Final = AnyChampion.ANY
InsteadOf = int | Literal[AnyChampion.ANY] | None
"""Which version is believed to be champion: its number; None: there is none; `ANY`: whichever."""


@dataclass(frozen=True)
class PromotionRequest:
    """What a move is to be.

    Attributes:
        kind: what was asked for.
        version: who is to be champion.
        run: id of the run that asks for it; empty: a person.
        why: for people to read.
        instead_of: who must be champion until then.
    """

    kind: Kind
    version: Version
    run: str
    why: str
    instead_of: InsteadOf

    @property
    def refusal(self) -> str:
        """How an error begins."""
        done = "promoted" if self.kind == "promote" else "rolled back to"
        return f"{self.version} was not {done}"


def move_aliases(
    store: CheckpointStore,
    versions: NumberedLog[Version],
    moves: NumberedLog[Move],
    wish: PromotionRequest,
) -> Move:
    """Make a version the champion; see the module. One that is it already stays it.

    Raises:
        CheckpointDamaged: of its checkpoint: which file.
        CheckpointNotFound: its checkpoint was deleted.
        PromotionRefused: its checkpoint is being deleted.
        PromotionConflict: somebody else has moved the aliases meanwhile.
        StorageError: the storage failed. The move may have been made.
    """
    last = moves.last()
    if not _is_done(wish, last):
        _check_champion(wish, last)
        _verify(store, wish)
        last = moves.last()  # that may have taken long
    if last is not None and _is_done(wish, last):
        _tidy(store, versions, last)
        return last
    _check_champion(wish, last)
    move = _next(wish, last)
    held = _hold(store, wish, move) if wish.kind == "promote" else None
    try:
        moves.append(move)
    except FileExistsError:
        if held is not None:
            _give_up(store, held.key)
        winner = moves.read(move.number)
        raise _conflict(wish, winner, move.number) from None
    except StorageError as error:
        raise StorageError(
            f"whether {wish.version} has become champion is not known, look at its model's moves: "
            f"{error}"
        ) from error
    _tidy(store, versions, move)
    return move


def _is_done(wish: PromotionRequest, last: Move | None) -> bool:
    """Whether it is champion already, and nobody is to be told that it was not this very wish."""
    if last is None or last.champion != wish.version.number:
        return False
    is_own = bool(wish.run) and last.run == wish.run
    return is_own or wish.instead_of in (ANY, last.champion)


def _check_champion(wish: PromotionRequest, last: Move | None) -> None:
    champion = last.champion if last is not None else None
    if wish.instead_of is not ANY and wish.instead_of != champion:
        raise _conflict(wish, last)


def _conflict(wish: PromotionRequest, winner: Move | None, number: int = 0) -> PromotionConflict:
    if winner is None and not number:
        return PromotionConflict(
            f"{wish.refusal}: model {wish.version.model} has no champion, and version "
            f"{wish.instead_of} was expected to be it"
        )
    if winner is None:
        return PromotionConflict(
            f"{wish.refusal}: somebody else is moving the aliases of model {wish.version.model} "
            f"(move {number}); try again; if nobody is, that object is half a one: delete it"
        )
    return PromotionConflict(
        f"{wish.refusal}: {winner} (move {winner.number}); look whether it is better than that, "
        "and try again"
    )


def _verify(store: CheckpointStore, wish: PromotionRequest) -> None:
    version = wish.version
    try:
        store.verify(version.checkpoint)
    except (CheckpointDamaged, CheckpointNotFound) as error:
        # Half of it may have been deleted while it was read.
        is_there = store.storage.read(version.manifest_key) is not None
        if isinstance(error, CheckpointDamaged) and is_there:
            raise CheckpointDamaged(f"{wish.refusal}: {error}") from error
        raise CheckpointNotFound(
            f"{wish.refusal}: its checkpoint {version.checkpoint}, of trial {version.trial}, was "
            "deleted; of a model's versions, champion and previous alone stay whatever the rules "
            "for old checkpoints say"
        ) from error


def _next(wish: PromotionRequest, last: Move | None) -> Move:
    return Move(
        number=last.number + 1 if last is not None else 1,
        model=wish.version.model,
        kind=wish.kind,
        champion=wish.version.number,
        previous=last.champion if last is not None else None,
        at=utc_now(),
        by=user_at_host(),
        run=wish.run,
        why=wish.why,
        unique=uuids.uuid4().hex,
    )


def _hold(store: CheckpointStore, wish: PromotionRequest, move: Move) -> RegistryHold:
    version = wish.version
    held = RegistryHold(
        uuid=version.checkpoint,
        model=version.model,
        version=version.number,
        move=move.number,
        unique=move.unique,
        by=move.by,
        at=move.at,
    )
    name = ManifestName(version.trial, version.batches_trained, version.checkpoint)
    try:
        hold(store, name, held)
    except CommitConflict as error:
        raise PromotionRefused(f"{wish.refusal}: {error}") from error
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"{wish.refusal}: its {error}") from error
    return held


def _tidy(store: CheckpointStore, versions: NumberedLog[Version], move: Move) -> None:
    """Drop this model's holds for moves up to this one on what it does not name."""
    numbers = [move.champion] + ([move.previous] if move.previous is not None else [])
    try:
        named = [versions.read(number) for number in numbers]
        if None in named:
            return  # who knows what is held for it
        needed = {version.checkpoint for version in named if version is not None}
        for uuid, of_one in holds(store).items():
            for held in of_one:
                if held.model == move.model and held.move <= move.number and uuid not in needed:
                    store.storage.remove(held.key)
    except (StorageError, RegistryError) as error:
        _logger.warning("checkpoints stay held until the next move: %s", error)


def _give_up(store: CheckpointStore, key: str) -> None:
    try:
        store.storage.remove(key)
    except StorageError as error:
        _logger.warning("a checkpoint stays held until the next move: %s", error)
