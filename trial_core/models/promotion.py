"""Moving the aliases of a model: `champion`, and `previous`, the champion before it.

The aliases are a log (see `NumberedLog`). A move stores both aliases, so a move is never half
done. Move n + 1 is decided from move n, so of several concurrent moves one succeeds.

The champion's checkpoint must be intact and must not be pruned. A promotion therefore:

    P1  verifies every byte of the checkpoint
    P2  reads the last move, n
    P3  writes a hold on the checkpoint for move n + 1 (see `protections`), then checks that the
        checkpoint exists and is not being deleted
    P4  creates move n + 1; if another process created it first, removes the hold
    P5  removes holds for moves up to n + 1 on checkpoints other than champion and previous

A hold for a move number that is taken belongs to a promotion that lost. A hold for a later number
may belong to one that is about to win. A process killed in between leaves at most one extra hold,
which the next move removes. A rollback needs no new hold: `previous` still has the hold of its
promotion.
"""

from __future__ import annotations

import logging
import uuid as uuids
from dataclasses import dataclass
from typing import Final, Literal

from trial_core.checkpoint.json_objects import encode_json, user_at_host
from trial_core.checkpoint.layout import ManifestName
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.numbered_log import NumberedLog
from trial_core.checkpoint.retention.deletion_markers import protect
from trial_core.checkpoint.retention.protections import Protection, protections
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
from trial_core.models.records import Move, RecordKind, Version

_logger = logging.getLogger(__name__)


ANY: Final = "any"
ExpectedChampion = int | Literal["any"] | None
"""The version that must be champion before the move: a number, None for none, or `ANY`."""


@dataclass(frozen=True)
class PromotionRequest:
    kind: RecordKind
    version: Version
    run: str
    why: str
    expected_champion: ExpectedChampion

    @property
    def refusal(self) -> str:
        done = "promoted" if self.kind == "promote" else "rolled back to"
        return f"{self.version} was not {done}"


def move_aliases(
    store: CheckpointStore,
    versions: NumberedLog[Version],
    moves: NumberedLog[Move],
    request: PromotionRequest,
) -> Move:
    """Make a version the champion. If it is champion already, returns the existing move. Raises as
    `Registry.promote`; after a StorageError the move may have been made."""
    last = moves.last()
    if not _is_done(request, last):
        _check_expected_champion(request, last)
        _verify(store, request)
        last = moves.last()  # verifying may have taken long
    if last is not None and _is_done(request, last):
        _remove_obsolete_holds(store, versions, last)
        return last
    _check_expected_champion(request, last)
    move = _next_move(request, last)
    hold = _hold(store, request, move) if request.kind == "promote" else None
    try:
        moves.append(move)
    except FileExistsError:
        if hold is not None:
            _remove_hold(store, hold)
        raise _conflict(request, moves.read(move.number), move.number) from None
    except StorageError as error:
        raise StorageError(
            f"it is unknown whether {request.version} became champion; check with "
            f"`trialflow models show {move.model}`: {error}"
        ) from error
    _remove_obsolete_holds(store, versions, move)
    return move


def _is_done(request: PromotionRequest, last: Move | None) -> bool:
    """Return whether the last move already fulfils the request, of the same run or of any."""
    if last is None or last.champion != request.version.number:
        return False
    is_own_move = bool(request.run) and last.run == request.run
    return is_own_move or request.expected_champion in (ANY, last.champion)


def _check_expected_champion(request: PromotionRequest, last: Move | None) -> None:
    champion = last.champion if last is not None else None
    is_expected = request.expected_champion in (ANY, champion)
    if request.kind == "rollback":
        # The champion may be the expected one again, after other moves, with another previous.
        is_expected &= last is not None and last.previous == request.version.number
    if not is_expected:
        raise _conflict(request, last)


def _conflict(
    request: PromotionRequest, winner: Move | None, number: int | None = None
) -> PromotionConflict:
    """The error for a lost race. `winner`: the move that won, None if it cannot be read; `number`:
    the requested move's, if it was taken."""
    model = request.version.model
    if winner is not None:
        problem = (
            f"{winner} (move {winner.number}); compare with that version, and promote again if "
            "this one is better"
        )
    elif number is None:
        problem = (
            f"version {request.expected_champion} was expected to be champion, but model {model} "
            "has no champion"
        )
    else:
        problem = (
            f"another process is moving the aliases of model {model} (move {number}); try again"
        )
    return PromotionConflict(f"{request.refusal}: {problem}")


def _verify(store: CheckpointStore, request: PromotionRequest) -> None:
    version = request.version
    try:
        store.verify(version.checkpoint)
    except (CheckpointDamaged, CheckpointNotFound) as error:
        # Files that disappear with the manifest were deleted during verification, not damaged.
        is_committed = store.storage.exists(version.manifest_key)
        if isinstance(error, CheckpointDamaged) and is_committed:
            raise CheckpointDamaged(f"{request.refusal}: {error}") from error
        raise CheckpointNotFound(
            f"{request.refusal}: its checkpoint {version.checkpoint} of trial {version.trial} was "
            "deleted (only the checkpoints of champion and previous are protected from pruning); "
            "choose another version"
        ) from error


def _next_move(request: PromotionRequest, last: Move | None) -> Move:
    return Move(
        number=last.number + 1 if last is not None else 1,
        model=request.version.model,
        kind=request.kind,
        champion=request.version.number,
        previous=last.champion if last is not None else None,
        at=utc_now(),
        by=user_at_host(),
        run=request.run,
        why=request.why,
        unique=uuids.uuid4().hex,
    )


def _hold(store: CheckpointStore, request: PromotionRequest, move: Move) -> Protection:
    version = request.version
    hold = Protection(
        uuid=version.checkpoint,
        kind="hold",
        model=version.model,
        version=version.number,
        move=move.number,
        unique=move.unique,
        by=move.by,
        at=move.at,
    )
    name = ManifestName(version.trial, version.batches_trained, version.checkpoint)
    try:
        protect(store, name, hold.key, encode_json(hold))
    except CommitConflict as error:
        raise PromotionRefused(f"{request.refusal}: {error}") from error
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"{request.refusal}: its {error}") from error
    return hold


def _remove_obsolete_holds(
    store: CheckpointStore, versions: NumberedLog[Version], move: Move
) -> None:
    """Remove holds for moves up to this one on checkpoints other than champion and previous."""
    numbers = [move.champion] + ([move.previous] if move.previous is not None else [])
    try:
        named = [versions.read(number) for number in numbers]
        if None in named:
            return  # the checkpoint of an unreadable version is unknown: remove nothing
        needed = {version.checkpoint for version in named if version is not None}
        for uuid, of_checkpoint in protections(store, kind="hold").items():
            for hold in of_checkpoint:
                if hold.model == move.model and hold.move <= move.number and uuid not in needed:
                    store.storage.remove(hold.key)
    except (StorageError, RegistryError) as error:
        _logger.warning(
            "obsolete holds protect checkpoints of model %s until its next move: %s",
            move.model, error,
        )  # fmt: skip


def _remove_hold(store: CheckpointStore, hold: Protection) -> None:
    try:
        store.storage.remove(hold.key)
    except StorageError as error:
        _logger.warning(
            "an obsolete hold protects checkpoint %s until the next move of model %s: %s",
            hold.uuid, hold.model, error,
        )  # fmt: skip
