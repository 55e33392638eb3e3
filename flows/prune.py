"""The flow `prune`: delete the checkpoints of an experiment that its rules do not keep.

A run prunes its own trial after each commit. This is for the rest: trials that have ended, rules
that were changed, the best of an experiment when a better one has come; and what killed runs have
begun to upload, where their trials never run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_type_hints

from prefect import flow
from prefect.artifacts import create_table_artifact

from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.retention.leftovers import LEFTOVER_AGE_DAYS, Leftover
from trial_core.retention.policy import RetentionDecision
from trial_core.retention.pruning import PruningPlan
from trial_core.run.run_dirs import slug
from trialflow.flows.lifecycle.crash_limit import refuse_if_crashed_too_often
from trialflow.tasks.prune import delete_checkpoints, plan_prune, plan_sweep, sweep


@dataclass(frozen=True)
class PruneResult:
    """What a run of the flow came to.

    Attributes:
        kept, deleted: uuids. In a dry run `deleted` is what would be.
        swept: likewise, of uploads that were never committed.
        freed_bytes: size of what is (or would be) gone.
        is_dry_run: whether nothing was deleted.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    freed_bytes: int
    is_dry_run: bool


@flow(name="prune", flow_run_name="prune {config.name}", validate_parameters=True)
def prune(
    config: ExperimentConfig,
    dry_run: bool = True,
    trial: str | None = None,
    leftovers_only: bool = False,
    leftovers_after_days: float = LEFTOVER_AGE_DAYS,
) -> PruneResult:
    """Delete what the rules of `checkpoint_storage` do not keep, and what killed runs have left.

    Args:
        config: the experiment: where its checkpoints are, its rules, and what is best.
        dry_run: only say what would be deleted, and why: a table among the run's artifacts.
        trial: prune this trial alone; by default all trials of the experiment.
        leftovers_only: delete no checkpoint, only what was never committed; needs no rules.
        leftovers_after_days: when that is given up: after so long without a sign of life of its
            trial.

    Raises:
        ConfigError: the experiment has no rules, so everything is kept; or leftovers are to be
            given up so soon that an upload may take as long.
        StorageError: the storage failed.
    """
    refuse_if_crashed_too_often(config.max_restarts)
    policy = config.retention()
    if policy is None and not leftovers_only:
        raise ConfigError(
            "checkpoint_storage says nothing of which checkpoints to keep, so all are kept; give "
            "save_trial_best, save_trial_latest, save_experiment_best or keep_every"
        )
    place = config.checkpoint_storage
    store = CheckpointStore(place.url, place.options)
    plan = None
    if policy is not None and not leftovers_only:
        plan = plan_prune(store, policy, config.name, trial)
    left = plan_sweep(store, leftovers_after_days, config.name, trial)
    _show(config.name, plan, left, dry_run)
    if dry_run:
        return _planned(plan, left)
    return _carry_out(store, plan, left, leftovers_after_days)


# What flow.serve() pickles has no names of this module, which the annotations are read in.
prune.fn.__annotations__ = get_type_hints(prune.fn)


def _planned(plan: PruningPlan | None, left: list[Leftover]) -> PruneResult:
    gone = [each for each in left if not each.keep]
    return PruneResult(
        kept=_uuids(plan.kept if plan is not None else ()),
        deleted=_uuids(plan.deletions if plan is not None else ()),
        swept=tuple(each.uuid for each in gone),
        freed_bytes=_freed_bytes(plan, left),
        is_dry_run=True,
    )


def _carry_out(
    store: CheckpointStore, plan: PruningPlan | None, left: list[Leftover], after_days: float
) -> PruneResult:
    kept: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()
    freed_bytes = 0
    if plan is not None:
        pruned = delete_checkpoints(store, plan)
        kept = _uuids(plan.kept) + _uuids(pruned.spared)
        deleted = tuple(manifest.uuid for manifest in pruned.deleted)
        freed_bytes += pruned.freed_bytes
    if any(not each.keep for each in left):
        done = sweep(store, left, after_days)
        swept = tuple(each.uuid for each in done.swept if each.uuid is not None)
        freed_bytes += done.freed_bytes
    return PruneResult(kept, deleted, swept, freed_bytes, is_dry_run=False)


def _uuids(decisions: Iterable[RetentionDecision]) -> tuple[str, ...]:
    return tuple(decision.manifest.uuid for decision in decisions)


def _freed_bytes(plan: PruningPlan | None, left: list[Leftover]) -> int:
    of_leftovers = sum(each.size_bytes for each in left if not each.keep)
    return of_leftovers + (plan.freed_bytes if plan is not None else 0)


def _show(experiment: str, plan: PruningPlan | None, left: list[Leftover], dry_run: bool) -> None:
    """What is planned as a table, on the run's page."""
    counts = []
    if plan is not None:
        counts.append(f"{len(plan.deletions)} of {len(plan.decisions)} checkpoints")
    if left or plan is None:
        gone = sum(not each.keep for each in left)
        counts.append(f"{gone} of {len(left)} uploads that were never committed")
    keeping = f", keeping {plan.policy}" if plan is not None else ""
    create_table_artifact(
        [*(plan.rows() if plan is not None else []), *(each.row() for each in left)],
        key=f"prune-{slug(experiment)}",
        description=f"{'Would delete' if dry_run else 'Deletes'} {' and '.join(counts)} "
        f"({_freed_bytes(plan, left) / 2**20:.1f} MiB){keeping}",
    )
