"""The tasks of the flow `prune`, which delete checkpoints and leftovers."""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from trial_core.checkpoint.intents import SweptUpload
from trial_core.checkpoint.retention.leftovers import (
    Leftover,
    SweptLeftovers,
    find_leftovers,
    sweep_leftovers,
)
from trial_core.checkpoint.retention.pruning import (
    Pruned,
    PruningPlan,
    describe,
    plan_pruning,
    prune,
)
from trial_core.checkpoint.retention_policy import RetentionDecision, RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trialflow.tasks.retrying import TRANSFER


@task(name="plan-prune", task_run_name="plan-prune", **TRANSFER)
def plan_prune(
    store: CheckpointStore, policy: RetentionPolicy, experiment: str, trial: str | None
) -> PruningPlan:
    """Decide which of an experiment's checkpoints to delete, and log why. Raises StorageError."""
    plan = plan_pruning(store, policy, experiment, trial=trial)
    logger = get_run_logger()
    logger.info("keeping %s", policy)
    for decision in plan.decisions:
        what = describe(decision) if decision.keep else f"to be {describe(decision)}"
        logger.info("%s: %s", what, decision.why)
    return plan


@task(name="delete-checkpoints", task_run_name="delete-checkpoints", **TRANSFER)
def delete_checkpoints(store: CheckpointStore, plan: PruningPlan) -> Pruned:
    """Delete the plan's checkpoints, except checkpoints that have become needed since.

    Raises:
        StorageError: the storage failed. The next prune finishes interrupted deletions.
    """
    logger = get_run_logger()

    def log_deleted(decision: RetentionDecision) -> None:
        logger.info("%s: %s", describe(decision), decision.why)

    pruned = prune(store, plan, log_deleted)
    for decision in pruned.spared:
        logger.warning("checkpoint %s stays: %s", decision.manifest.uuid, decision.why)
    return pruned


@task(name="plan-sweep", task_run_name="plan-sweep", **TRANSFER)
def plan_sweep(
    store: CheckpointStore, after_days: float, experiment: str, trial: str | None
) -> list[Leftover]:
    """Find the leftovers of an experiment, and log which are to be deleted and why.

    Raises:
        ConfigError: `after_days` is too short.
        StorageError: the storage cannot be read.
    """
    found = find_leftovers(store, after_days=after_days, trial=trial, experiment=experiment)
    logger = get_run_logger()
    for each in found:
        what = "kept" if each.keep else "to be deleted"
        logger.info("leftover %s of trial %s, %s: %s", each.uuid, each.trial or "?", what, each.why)
    return found


@task(name="sweep-leftovers", task_run_name="sweep-leftovers", **TRANSFER)
def sweep(store: CheckpointStore, found: list[Leftover], after_days: float) -> SweptLeftovers:
    """Delete the leftovers, except leftovers of trials that have become active since.

    Raises:
        StorageError: the storage failed. The next prune deletes the rest.
    """
    logger = get_run_logger()

    def log_swept(swept: SweptUpload) -> None:
        logger.info("deleted %s", swept)

    done = sweep_leftovers(store, found, after_days=after_days, on_swept=log_swept)
    for trial, why in done.spared.items():
        logger.warning("leftovers of trial %s stay: %s", trial, why)
    return done
