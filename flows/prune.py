"""The flow `prune`: delete the checkpoints of an experiment that its rules do not keep.

A run prunes its own trial after each commit. This is for the rest: trials that have ended, rules
that were changed, the best of an experiment when a better one has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_type_hints

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows.crashes import refuse_if_crashed_too_often
from tasks.prune import delete_checkpoints, plan_prune
from trial_core.checkpoint.pruning import Plan
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.runs import slug


@dataclass(frozen=True)
class PruneResult:
    """What a run of the flow came to.

    Attributes:
        kept, deleted: uuids. In a dry run `deleted` is what would be.
        freed_bytes: size of what is (or would be) gone.
        is_dry_run: whether nothing was deleted.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    freed_bytes: int
    is_dry_run: bool


@flow(name="prune", flow_run_name="prune {config.name}", validate_parameters=True)
def prune(config: ExperimentConfig, dry_run: bool = True, trial: str | None = None) -> PruneResult:
    """Delete what the rules of `checkpoint_storage` do not keep.

    Args:
        config: the experiment: where its checkpoints are, its rules, and what is best.
        dry_run: only say what would be deleted, and why: a table among the run's artifacts.
        trial: prune this trial alone; by default all trials of the experiment.

    Raises:
        ConfigError: the experiment has no rules, so everything is kept.
        StorageError: the storage failed.
    """
    refuse_if_crashed_too_often(config.max_restarts)
    policy = config.retention()
    if policy is None:
        raise ConfigError(
            "checkpoint_storage says nothing of which checkpoints to keep, so all are kept; give "
            "save_trial_best, save_trial_latest, save_experiment_best or keep_every"
        )
    place = config.checkpoint_storage
    store = CheckpointStore(place.url, place.options)
    plan = plan_prune(store, policy, config.name, trial)
    _show(plan, dry_run)
    kept = tuple(decision.manifest.uuid for decision in plan.kept)
    if dry_run:
        planned = tuple(decision.manifest.uuid for decision in plan.deletions)
        return PruneResult(kept, planned, plan.freed_bytes, is_dry_run=True)
    pruned = delete_checkpoints(store, plan)
    spared = tuple(decision.manifest.uuid for decision in pruned.spared)
    deleted = tuple(manifest.uuid for manifest in pruned.deleted)
    return PruneResult(kept + spared, deleted, pruned.freed_bytes, is_dry_run=False)


# What flow.serve() pickles has no names of this module, which the annotations are read in.
prune.fn.__annotations__ = get_type_hints(prune.fn)


def _show(plan: Plan, dry_run: bool) -> None:
    """The plan as a table, on the run's page."""
    count = f"{len(plan.deletions)} of {len(plan.decisions)} checkpoints"
    create_table_artifact(
        plan.rows(),
        key=f"prune-{slug(plan.experiment)}",
        description=f"{'Would delete' if dry_run else 'Deletes'} {count} "
        f"({plan.freed_bytes / 2**20:.1f} MiB), keeping {plan.policy}",
    )
