"""Deleting what the rules do not keep: planned, shown, then carried out.

`retention` decides; here is what it decides upon, and the deleting. Between the plan and a
deletion somebody may pin the checkpoint, or start a run from it: so before each one it is said in
the storage that it is being deleted, and then looked again (see `pins`). What says so holds the
manifest as well, so a deletion that was interrupted is finished by whoever comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, is_older, user_at_host
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError
from trial_core.retention.claims import Claim, claims, uploading
from trial_core.retention.pins import (
    DELETIONS,
    STALE,
    Deletion,
    deletion_key,
    kept,
    read_deletion,
    why_kept,
)
from trial_core.retention.policy import RetentionDecision, RetentionPolicy, decide

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruningPlan:
    """What becomes of each checkpoint of an experiment, or of one of its trials.

    Attributes:
        decisions: oldest first.
    """

    experiment: str
    policy: RetentionPolicy
    decisions: tuple[RetentionDecision, ...]

    @property
    def deletions(self) -> list[RetentionDecision]:
        """Those that are to be deleted."""
        return [decision for decision in self.decisions if not decision.keep]

    @property
    def kept(self) -> list[RetentionDecision]:
        """The others."""
        return [decision for decision in self.decisions if decision.keep]

    @property
    def freed_bytes(self) -> int:
        """Size of what is to be deleted."""
        return sum(decision.manifest.total_bytes for decision in self.deletions)

    def rows(self) -> list[dict[str, Any]]:
        """The plan as a table of plain data."""
        return [
            {
                "action": "keep" if decision.keep else "delete",
                "uuid": decision.manifest.uuid,
                "trial": decision.manifest.trial,
                "batches_trained": decision.manifest.progress.batches_trained,
                "created_at": decision.manifest.created_at,
                "total_bytes": decision.manifest.total_bytes,
                "why": decision.why,
            }
            for decision in self.decisions
        ]


@dataclass(frozen=True)
class Pruned:
    """What came of a plan.

    Attributes:
        deleted: those that are gone.
        spared: those that somebody has come to need since the plan was made, and why.
    """

    deleted: tuple[Manifest, ...]
    spared: tuple[RetentionDecision, ...]

    @property
    def freed_bytes(self) -> int:
        """Size of what is gone."""
        return sum(manifest.total_bytes for manifest in self.deleted)


def plan_pruning(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str,
    *,
    trial: str | None = None,
    running: Collection[str] = (),
    needed: Mapping[str, str] | None = None,
) -> PruningPlan:
    """What `policy` keeps of an experiment's checkpoints and what it does not. Changes nothing.

    Args:
        trial: decide on this trial's checkpoints alone. The others still count for what is best
            in the experiment.
        running: trials known to run, besides those that claim it.
        needed: uuids of checkpoints that must stay besides, and why.

    Raises:
        StorageError: the storage cannot be read.
    """
    is_alone = trial is not None and policy.save_experiment_best == 0
    manifests = store.list(trial if is_alone else None)
    named = _experiments_of_trials(manifests)
    trials = {name for name in named if is_alone or named[name] == experiment}
    manifests = [manifest for manifest in manifests if manifest.trial in trials]
    claimed = claims(store, last_saved={each.trial: each.created_at for each in manifests})
    decisions = decide(
        manifests,
        policy,
        needed={
            **_needs(claimed, manifests),
            **kept(store),
            **(needed or {}),
        },
        running={*running, *(claim.trial for claim in claimed), *uploading(store)},
    )
    of_interest = (each for each in decisions if trial is None or each.manifest.trial == trial)
    return PruningPlan(experiment, policy, tuple(of_interest))


def experiments(store: CheckpointStore) -> list[str]:
    """The names of all experiments that have checkpoints."""
    return sorted({*_experiments_of_trials(store.list()).values()})


def prune(
    store: CheckpointStore,
    plan: PruningPlan,
    on_deleted: Callable[[RetentionDecision], None] = lambda decision: None,
) -> Pruned:
    """Delete what the plan says, one checkpoint after the other; and what others began to delete.

    May be called again after an error, and by several at once.

    Args:
        on_deleted: told of each checkpoint that is gone.

    Raises:
        StorageError: the storage failed. Checkpoints deleted until then are gone; one that was
            being deleted is not listed any more, and its files go with the next prune.
    """
    finish_deletions(store)
    deleted: list[Manifest] = []
    spared: list[RetentionDecision] = []
    for decision in plan.deletions:
        manifest = decision.manifest
        _say_that_it_is_deleted(store, manifest)
        reason = _needed_by_now(store, manifest)
        if reason is None:
            store.delete(manifest)
            deleted.append(manifest)
            on_deleted(decision)
        else:
            spared.append(RetentionDecision(manifest, True, reason))
        store.storage.remove(deletion_key(manifest.uuid))
    return Pruned(tuple(deleted), tuple(spared))


def prune_trial(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str,
    trial: str,
    logger: logging.Logger | logging.LoggerAdapter[Any],
    on_deleted: Callable[[str], None] = lambda uuid: None,
) -> None:
    """Prune a trial that runs: for after each of its commits. What fails is a warning, no more.

    Args:
        on_deleted: told the uuid of each checkpoint that is gone.
    """

    def say(decision: RetentionDecision) -> None:
        logger.info("%s: %s", described(decision), decision.why)
        on_deleted(decision.manifest.uuid)

    try:
        plan = plan_pruning(store, policy, experiment, trial=trial, running=(trial,))
        prune(store, plan, say)
    except CheckpointError as error:
        logger.warning(
            "old checkpoints were not deleted, which is tried again after the next one: %s", error
        )


def described(decision: RetentionDecision) -> str:
    """A checkpoint and what became of it, for a log."""
    manifest = decision.manifest
    return (
        f"{'kept' if decision.keep else 'deleted'} checkpoint {manifest.uuid} of {manifest.trial} "
        f"@{manifest.progress.batches_trained}, {manifest.total_bytes} bytes"
    )


def finish_deletions(store: CheckpointStore) -> list[Manifest]:
    """Delete the files of checkpoints whose deletion was interrupted; which those were.

    One whose manifest is still there has not been deleted: that it was to be is forgotten.
    """
    finished = []
    for key in sorted(store.storage.sizes(DELETIONS)):
        uuid = key.removeprefix(f"{DELETIONS}/").removesuffix(".json")
        if not layout.is_uuid(uuid):
            continue
        deletion = read_deletion(store, uuid)
        if deletion is not None:
            manifest = _manifest_in(deletion, f"{store.url}/{key}")
            if manifest is None:
                continue
            if store.storage.read(manifest.name.key) is None:
                store.delete(manifest)
                finished.append(manifest)
            elif not is_older(deletion.at, STALE):
                continue  # somebody is at it
        store.storage.remove(key)
    return finished


def _experiments_of_trials(manifests: Iterable[Manifest]) -> dict[str, str]:
    """The experiment of each trial: one, and the last, also where it was renamed between runs.

    Args:
        manifests: oldest first.
    """
    return {manifest.trial: manifest.experiment for manifest in manifests}


def _needs(claimed: Iterable[Claim], manifests: Collection[Manifest]) -> dict[str, str]:
    """What runs have started from."""
    return {
        manifest.uuid: claim.why()
        for claim in claimed
        for begins in claim.needs
        for manifest in manifests
        if begins and manifest.uuid.startswith(begins)
    }


def _say_that_it_is_deleted(store: CheckpointStore, manifest: Manifest) -> None:
    said = Deletion(by=user_at_host(), at=utc_now(), manifest=manifest.to_json().decode())
    store.storage.write(deletion_key(manifest.uuid), encode_json(said))


def _needed_by_now(store: CheckpointStore, manifest: Manifest) -> str | None:
    """Why a checkpoint that was to be deleted must stay, if it must."""
    why = why_kept(store, manifest.uuid)
    if why is not None:
        return why
    return _needs(claims(store), [manifest]).get(manifest.uuid)


def _manifest_in(deletion: Deletion, where: str) -> Manifest | None:
    try:
        return Manifest.from_json(deletion.manifest.encode(), where)
    except CheckpointError as error:
        _logger.warning("left as it is, and its files may stay behind: %s", error)
        return None
