"""What became of the versions of a model: promoted or not, and why."""

from __future__ import annotations

from collections.abc import Sequence

from trial_core.checkpoint.storage.parallel import read_all
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RegistryError
from trial_core.models.journal import Journal, PromotionDecision
from trial_core.models.records import Move, Version


def explain_versions(
    store: CheckpointStore, versions: Sequence[Version], moves: Sequence[Move]
) -> list[str]:
    """What became of each version, in words.

    Reads the journals of the retrainings that registered them.
    """
    return read_all(lambda version: _explain(store, version, moves), versions)


def _explain(store: CheckpointStore, version: Version, moves: Sequence[Move]) -> str:
    promotions = [move for move in moves if move.champion == version.number]
    by_its_run = next((move for move in promotions if move.run == version.run), None)
    if by_its_run is not None:
        return f"promoted: {by_its_run.why}" if by_its_run.why else "promoted"
    if not version.run:
        return "promoted" if promotions else "registered, not promoted"
    try:
        outcome = Journal(store, version.model, version.run).read("outcome", PromotionDecision)
    except RegistryError:
        return f"the journal of run {version.run} cannot be read"
    if outcome is None:
        return f"run {version.run} has not decided"
    later = "; promoted later" if promotions and not outcome.promoted else ""
    return f"{'' if outcome.promoted else 'not '}promoted: {outcome.why}{later}"
