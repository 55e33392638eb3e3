"""The tasks that delete checkpoints and leftovers.

`checkpoint-prune` follows each commit of a run whose experiment has retention rules. It runs beside
training, and its failures are only warnings: the next prune tries again. The other tasks are the
stages of the flow `prune`.
"""

from __future__ import annotations

import threading
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from trial_core.checkpoint.intents import SweptUpload
from trial_core.checkpoint.store import CheckpointStore
from trial_core.retention.leftovers import (
    Leftover,
    SweptLeftovers,
    find_leftovers,
    sweep_leftovers,
)
from trial_core.retention.policy import RetentionDecision, RetentionPolicy
from trial_core.retention.pruning import (
    Pruned,
    PruningPlan,
    describe,
    plan_pruning,
    prune,
    prune_trial,
)
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed
from trialflow.tasks.trial_run import TrialRun

# Options of every task of the flow `prune`.
_STAGE: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": STORAGE_RETRIES,
    "retry_delay_seconds": STORAGE_RETRY_SECONDS,
    "retry_condition_fn": storage_failed,
}


class Pruning:
    """The prunes of a run, one at a time. Commits during a prune cause one more prune after it."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        self._policy = run.config.retention()
        # Kept because Prefect complains about a future that is dropped before it has ended.
        self._pending: PrefectFuture[None] | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._due_at: int | None = None

    def start(self, batches_trained: int) -> None:
        """Prune after a commit, or once more after the prune in progress. Returns at once.

        Does nothing if the experiment keeps all checkpoints.
        """
        if self._policy is None:
            return
        if not self._has_ended.is_set():
            self._due_at = batches_trained
            return
        self._due_at = None
        # The future's own `state` would ask the server over HTTP.
        self._has_ended = has_ended = threading.Event()
        self._pending = checkpoint_prune.submit(self._run, self._policy, batches_trained)
        self._pending.add_done_callback(lambda _: has_ended.set())

    def finish(self) -> None:
        """Prune once more if due, and wait for the end. A failed prune raises nothing."""
        self.wait()
        if self._due_at is not None:
            self.start(self._due_at)
            self.wait()

    def wait(self) -> None:
        """Wait for the prune in progress, without starting another: for a run that has failed."""
        self._has_ended.wait()


@task(
    name="checkpoint-prune",
    task_run_name="checkpoint-prune @{batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_prune(run: TrialRun, policy: RetentionPolicy, batches_trained: int) -> None:
    """Delete the checkpoints of the run's trial that its experiment does not keep."""
    prune_trial(
        run.store, policy, run.config.name, run.trial, get_run_logger(),
        run.observer.checkpoint_deleted,
    )  # fmt: skip


@task(name="plan-prune", task_run_name="plan-prune", **_STAGE)
def plan_prune(
    store: CheckpointStore, policy: RetentionPolicy, experiment: str, trial: str | None
) -> PruningPlan:
    """Decide which of an experiment's checkpoints to delete, and log why.

    Raises:
        StorageError: the storage cannot be read.
    """
    plan = plan_pruning(store, policy, experiment, trial=trial)
    logger = get_run_logger()
    logger.info("keeping %s", policy)
    for decision in plan.decisions:
        what = describe(decision) if decision.keep else f"to be {describe(decision)}"
        logger.info("%s: %s", what, decision.why)
    return plan


@task(name="delete-checkpoints", task_run_name="delete-checkpoints", **_STAGE)
def delete_checkpoints(store: CheckpointStore, plan: PruningPlan) -> Pruned:
    """Delete the plan's checkpoints, except those that are needed by now.

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


@task(name="plan-sweep", task_run_name="plan-sweep", **_STAGE)
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


@task(name="sweep-leftovers", task_run_name="sweep-leftovers", **_STAGE)
def sweep(store: CheckpointStore, found: list[Leftover], after_days: float) -> SweptLeftovers:
    """Delete the leftovers, except those of trials that have become active since.

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
