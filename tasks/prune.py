"""checkpoint-prune, plan-prune, delete-checkpoints and their kind: what need not stay is deleted.

The first follows every commit of a run whose experiment says which checkpoints to keep. It runs
beside training, and what fails in it is a warning: the next one tries again. The others are the
stages of the flow `prune`; two of them are for what killed runs have begun to upload.
"""

from __future__ import annotations

import threading

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
    described,
    plan_pruning,
    prune,
    prune_trial,
)
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed
from trialflow.tasks.run import TrialRun


class Pruning:
    """The prune under way, if any, and whether another one is due after it."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        self._policy = run.config.retention()
        # Kept: Prefect complains of a future that is thrown away before its end.
        self._pending: PrefectFuture[None] | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._due_at: int | None = None

    def start(self, batches_trained: int) -> None:
        """A checkpoint was committed: prune; where that is under way, once more when it ends.

        Returns at once. Does nothing for an experiment that keeps all.
        """
        if self._policy is None:
            return
        if not self._has_ended.is_set():
            self._due_at = batches_trained
            return
        self._due_at = None
        # Known here: the future's own `state` would ask the server, over HTTP.
        self._has_ended = has_ended = threading.Event()
        self._pending = checkpoint_prune.submit(self._run, self._policy, batches_trained)
        self._pending.add_done_callback(lambda _: has_ended.set())

    def finish(self) -> None:
        """Prune once more if that is due, and wait for the end. Raises nothing of what failed."""
        self.wait()
        if self._due_at is not None:
            self.start(self._due_at)
            self.wait()

    def wait(self) -> None:
        """Wait for the prune under way alone: for a run that ends badly."""
        self._has_ended.wait()


@task(
    name="checkpoint-prune",
    task_run_name="checkpoint-prune @{batches_trained}",
    cache_policy=NO_CACHE,
)
def checkpoint_prune(run: TrialRun, policy: RetentionPolicy, batches_trained: int) -> None:
    """Delete those of the trial's checkpoints that its experiment does not keep."""
    prune_trial(
        run.store, policy, run.config.name, run.trial, get_run_logger(),
        run.observer.checkpoint_deleted,
    )  # fmt: skip


@task(
    name="plan-prune",
    task_run_name="plan-prune",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def plan_prune(
    store: CheckpointStore, policy: RetentionPolicy, experiment: str, trial: str | None
) -> PruningPlan:
    """What is to be deleted of an experiment's checkpoints, and why.

    Raises:
        StorageError: the storage cannot be read.
    """
    plan = plan_pruning(store, policy, experiment, trial=trial)
    logger = get_run_logger()
    logger.info("keeping %s", policy)
    for decision in plan.decisions:
        what = described(decision) if decision.keep else f"to be {described(decision)}"
        logger.info("%s: %s", what, decision.why)
    return plan


@task(
    name="delete-checkpoints",
    task_run_name="delete-checkpoints",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def delete_checkpoints(store: CheckpointStore, plan: PruningPlan) -> Pruned:
    """Delete what the plan says, save what somebody has come to need meanwhile.

    Raises:
        StorageError: the storage failed; what was begun is finished by the next prune.
    """
    logger = get_run_logger()

    def say(decision: RetentionDecision) -> None:
        logger.info("%s: %s", described(decision), decision.why)

    pruned = prune(store, plan, say)
    for decision in pruned.spared:
        logger.warning("%s stays: %s", decision.manifest.uuid, decision.why)
    return pruned


@task(
    name="plan-sweep",
    task_run_name="plan-sweep",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def plan_sweep(
    store: CheckpointStore, after_days: float, experiment: str, trial: str | None
) -> list[Leftover]:
    """What was begun to upload and is not committed, and whether it is to be deleted.

    Raises:
        ConfigError: `after_days` is too short.
        StorageError: the storage cannot be read.
    """
    found = find_leftovers(store, after_days=after_days, trial=trial, experiment=experiment)
    logger = get_run_logger()
    for each in found:
        what = "kept" if each.keep else "to be deleted"
        logger.info("%s, of %s, %s: %s", each.uuid, each.trial, what, each.why)
    return found


@task(
    name="sweep-leftovers",
    task_run_name="sweep-leftovers",
    cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES,
    retry_delay_seconds=STORAGE_RETRY_SECONDS,
    retry_condition_fn=storage_failed,
)
def sweep(store: CheckpointStore, found: list[Leftover], after_days: float) -> SweptLeftovers:
    """Delete what need not be kept of it, save where the trial has come to life meanwhile.

    Raises:
        StorageError: the storage failed; what is still there, the next prune finds.
    """
    logger = get_run_logger()

    def say(swept: SweptUpload) -> None:
        logger.info("deleted %s", swept)

    done = sweep_leftovers(store, found, after_days=after_days, on_swept=say)
    for trial, why in done.spared.items():
        logger.warning("what is left of trial %s stays: %s", trial, why)
    return done
