"""Pruning: plan which checkpoints to delete, show the plan, carry it out.

`checkpoint.retention_policy` decides. This module collects its input, and deletes. Between plan and
deletion a person may pin a checkpoint, or a run may start from it. So before each deletion the
pruner writes a marker and looks again: see `deletion_markers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trial_core.checkpoint.intents import uploads
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.references import why_unknown
from trial_core.checkpoint.retention.claims import claimed_checkpoints, claims, uploading_trials
from trial_core.checkpoint.retention.deletion_markers import delete_unless, finish_deletions
from trial_core.checkpoint.retention.protections import protected
from trial_core.checkpoint.retention_policy import RetentionDecision, RetentionPolicy, decide
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.any_logger import AnyLogger
from trial_core.errors import CheckpointError


@dataclass(frozen=True)
class PruningPlan:
    """The decision on each checkpoint of an experiment, or of one of its trials.

    Attributes:
        decisions: oldest checkpoint first.
        running: the trials that count as running, so that their newest checkpoints stay; and for
            each the runs that have claimed it (`Claim.owner`).
    """

    experiment: str
    policy: RetentionPolicy
    decisions: tuple[RetentionDecision, ...]
    running: Mapping[str, Collection[str]]

    @property
    def deletions(self) -> list[RetentionDecision]:
        return [decision for decision in self.decisions if not decision.keep]

    @property
    def kept(self) -> list[RetentionDecision]:
        return [decision for decision in self.decisions if decision.keep]

    @property
    def freed_bytes(self) -> int:
        """Total size of the files to delete: the files that no kept checkpoint lists."""
        files, needed = (
            {
                copy.key(each.manifest.uuid): copy.size_bytes
                for each in decisions
                for copy in each.manifest.copies
            }
            for decisions in (self.deletions, self.kept)
        )
        return sum(size for key, size in files.items() if key not in needed)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "action": "keep" if decision.keep else "delete",
                "uuid": decision.manifest.uuid,
                "trial": decision.manifest.trial,
                "batches_trained": decision.manifest.progress.batches_trained,
                "created_at": decision.manifest.created_at,
                "total_bytes": decision.manifest.total_bytes,
                "own_bytes": decision.manifest.own_bytes,
                "why": decision.why,
            }
            for decision in self.decisions
        ]


@dataclass(frozen=True)
class Pruned:
    """The result of a prune. `spared`: checkpoints that are needed since the plan was made, and
    why. `freed_bytes`: without files that others refer to, which are not deleted."""

    deleted: tuple[Manifest, ...]
    spared: tuple[RetentionDecision, ...]
    freed_bytes: int


def plan_pruning(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str,
    *,
    trial: str | None = None,
    running: Collection[str] = (),
) -> PruningPlan:
    """Decide which of an experiment's checkpoints to keep and which to delete, or those of one
    `trial`: the others still count for the best of the experiment. Changes nothing. `running`:
    trials known to run, in addition to trials with a claim."""
    is_alone = trial is not None and policy.save_experiment_best == 0
    manifests = store.list(trial if is_alone else None)
    named = _experiments_of_trials(manifests)
    trials = {name for name in named if is_alone or named[name] == experiment}
    manifests = [manifest for manifest in manifests if manifest.trial in trials]
    found = claims(store, last_saved={each.trial: each.created_at for each in manifests})
    all_running: dict[str, list[str]] = {each: [] for each in (*running, *uploading_trials(store))}
    for claim in found:
        all_running.setdefault(claim.trial, []).append(claim.owner)
    decisions = decide(
        manifests,
        policy,
        needed={**claimed_checkpoints(found, manifests), **protected(store)},
        running=all_running,
    )
    of_interest = (each for each in decisions if trial is None or each.manifest.trial == trial)
    return PruningPlan(experiment, policy, tuple(of_interest), all_running)


def experiments(store: CheckpointStore) -> list[str]:
    """The names of all experiments that have checkpoints."""
    return sorted({*_experiments_of_trials(store.list()).values()})


def prune(
    store: CheckpointStore,
    plan: PruningPlan,
    on_deleted: Callable[[RetentionDecision], None] = lambda decision: None,
) -> Pruned:
    """Delete the checkpoints that the plan deletes; first finish interrupted deletions. Several
    processes may prune at the same time. `on_deleted` is called after each deletion.

    May be repeated after an error: StorageError if the storage failed, or its clock and this
    machine's differ. Checkpoints deleted so far are gone. The one that was being deleted is not
    listed, and the next prune deletes its files.
    """
    if plan.deletions:
        store.storage.check_usable()  # clocks decide which claims count
    finish_deletions(store)
    deleted: list[Manifest] = []
    spared: list[RetentionDecision] = []
    freed_bytes = 0
    for decision in plan.deletions:
        manifest = decision.manifest
        why_needed = partial(_why_needed_now, store, manifest, plan.running)
        outcome = delete_unless(store, manifest, why_needed)
        if isinstance(outcome, str):
            spared.append(RetentionDecision(manifest, True, outcome))
        else:
            freed_bytes += outcome.size_bytes
            deleted.append(manifest)
            on_deleted(decision)
    return Pruned(tuple(deleted), tuple(spared), freed_bytes)


def delete_checkpoint(store: CheckpointStore, manifest: Manifest) -> None:
    """Delete one checkpoint, because a script or a person says so: no rule and no claim keeps it.
    Raises CheckpointError, and it stays, if it is pinned or held, or an upload refers to its files;
    the error says by whom. After a StorageError, the next prune finishes a deletion that has
    begun."""
    outcome = delete_unless(store, manifest, partial(_why_kept, store, manifest))
    if isinstance(outcome, str):
        raise CheckpointError(f"checkpoint {manifest.uuid} is not deleted: {outcome}")


def prune_trial(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str,
    trial: str,
    logger: AnyLogger,
    on_deleted: Callable[[str], None] = lambda uuid: None,
) -> None:
    """Prune a running trial: call this after each of its commits. Failures are only warnings."""

    def report(decision: RetentionDecision) -> None:
        logger.info("%s: %s", describe(decision), decision.why)
        on_deleted(decision.manifest.uuid)

    try:
        plan = plan_pruning(store, policy, experiment, trial=trial, running=(trial,))
        prune(store, plan, report)
    except CheckpointError as error:
        logger.warning(
            "old checkpoints are not deleted; the next checkpoint's prune tries again: %s", error
        )


def describe(decision: RetentionDecision) -> str:
    """A checkpoint and whether it is kept or deleted, for a log line."""
    manifest = decision.manifest
    return (
        f"{'kept' if decision.keep else 'deleted'} checkpoint {manifest.uuid} of {manifest.trial} "
        f"@{manifest.progress.batches_trained}, {manifest.total_bytes} bytes"
    )


def _experiments_of_trials(manifests: Iterable[Manifest]) -> dict[str, str]:
    """The experiment of each trial, the last one if it was renamed; oldest manifests first."""
    return {manifest.trial: manifest.experiment for manifest in manifests}


def _why_needed_now(
    store: CheckpointStore, manifest: Manifest, running: Mapping[str, Collection[str]]
) -> str | None:
    """Why a checkpoint that is about to be deleted must stay; None if it need not. A run that has
    started since (see `PruningPlan.running`) may resume from any of its trial."""
    if why := _why_kept(store, manifest):
        return why
    found = claims(store)
    owners = {claim.owner for claim in found if claim.trial == manifest.trial}
    has_new_owner = not owners.issubset(running.get(manifest.trial, ()))
    has_started = manifest.trial not in running and uploading_trials(store, manifest.trial)
    if has_new_owner or has_started:
        return "its trial has started to run since the plan was made"
    return claimed_checkpoints(found, [manifest]).get(manifest.uuid)


def _why_kept(store: CheckpointStore, manifest: Manifest) -> str | None:
    """Why a checkpoint stays in any case: it is protected, or others may refer to its files."""
    if why := protected(store, manifest.uuid).get(manifest.uuid):
        return why
    for intent in uploads(store.storage, manifest.trial):
        if intent.base == manifest.uuid or not intent.is_readable:
            return (
                f"checkpoint {intent.uuid}, whose upload has begun, may refer to its files; delete "
                "it once that upload has ended"
            )
    return why_unknown(store.storage, store.references(manifest.trial))
