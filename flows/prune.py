"""The flow `prune`: delete the checkpoints of an experiment that its rules do not keep.

A run prunes its own trial after each commit. This flow does the rest: ended trials, changed rules,
former best checkpoints of the experiment, and leftovers of trials that never run again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from prefect import flow
from prefect.artifacts import create_table_artifact

from trial_core.checkpoint.layout import checked_trial
from trial_core.checkpoint.retention.leftovers import LEFTOVER_AGE_DAYS, Leftover
from trial_core.checkpoint.retention.pruning import PruningPlan
from trial_core.checkpoint.retention_policy import RetentionDecision
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.text_format import unique_slug
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.tasks.prune import delete_checkpoints, plan_prune, plan_sweep, sweep
from trialflow.tasks.required_experiment import GIVEN, MISSING, experiment_form
from trialflow.tasks.storage_block import with_credentials


@dataclass(frozen=True)
class PruneResult:
    """The result of the flow.

    Attributes:
        kept, deleted: uuids of checkpoints. In a dry run, `deleted` would be deleted.
        swept: uuids of leftovers that were (or would be) deleted.
        freed_bytes: total size of the deleted files; in a dry run, of those it would delete.
        is_dry_run: True if nothing was deleted.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    freed_bytes: int
    is_dry_run: bool


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@experiment_form(
    dry_run="Dry run",
    trial="Trial",
    leftovers_only="Leftovers only",
    leftovers_after_days="Age of leftovers",
    config="Experiment",
)
@flow(name="prune", flow_run_name="prune {config.name}", validate_parameters=True)
def prune(
    config: Annotated[ExperimentConfig, GIVEN] = MISSING,
    dry_run: bool = True,
    trial: str | None = None,
    leftovers_only: bool = False,
    leftovers_after_days: float = LEFTOVER_AGE_DAYS,
) -> PruneResult:
    """Delete the checkpoints that the rules of `checkpoint_storage` do not keep, and leftovers.

    Args:
        config: the experiment: its storage, its rules, and its searcher metric.
        dry_run: delete nothing; list the candidates and the reasons in an artifact of the run.
        trial: prune this trial only; by default all trials of the experiment.
        leftovers_only: delete no checkpoint, only leftovers. Needs no rules.
        leftovers_after_days: delete leftovers of trials without activity for this many days.

    Raises:
        ConfigError: the experiment has no rules, so all checkpoints are kept; or
            `leftovers_after_days` is so short that an upload may take as long.
        CheckpointError: no trial may have the id `trial`.
        StorageError: the storage failed.
    """
    if trial is not None:
        checked_trial(trial)
    check_crash_limit(config.max_restarts)
    policy = config.retention()
    if policy is None and not leftovers_only:
        raise ConfigError(
            "checkpoint_storage has no rules, so all checkpoints are kept; set save_trial_best, "
            "save_trial_latest, save_experiment_best or keep_every"
        )
    place = with_credentials(config).checkpoint_storage
    store = CheckpointStore(place.url, place.options)
    plan = None
    if policy is not None and not leftovers_only:
        plan = plan_prune(store, policy, config.name, trial)
    leftovers = plan_sweep(store, leftovers_after_days, config.name, trial)
    _create_artifact(config.name, plan, leftovers, dry_run)
    kept = _uuids(plan.kept if plan is not None else ())
    deleted = _uuids(plan.deletions if plan is not None else ())
    swept = tuple(each.uuid for each in leftovers if not each.keep)
    if dry_run:
        return PruneResult(kept, deleted, swept, _freed_bytes(plan, leftovers), is_dry_run=True)
    freed_bytes = 0
    if plan is not None:
        pruned = delete_checkpoints(store, plan)
        kept += _uuids(pruned.spared)
        deleted = tuple(manifest.uuid for manifest in pruned.deleted)
        freed_bytes += pruned.freed_bytes
    if swept:
        done = sweep(store, leftovers, leftovers_after_days)
        swept = tuple(each.uuid for each in done.swept if each.uuid is not None)
        freed_bytes += done.freed_bytes
    return PruneResult(kept, deleted, swept, freed_bytes, is_dry_run=False)


def _uuids(decisions: Iterable[RetentionDecision]) -> tuple[str, ...]:
    return tuple(decision.manifest.uuid for decision in decisions)


def _freed_bytes(plan: PruningPlan | None, leftovers: list[Leftover]) -> int:
    of_leftovers = sum(each.size_bytes for each in leftovers if not each.keep)
    return of_leftovers + (plan.freed_bytes if plan is not None else 0)


def _create_artifact(
    experiment: str, plan: PruningPlan | None, leftovers: list[Leftover], dry_run: bool
) -> None:
    """Show the plan as a table on the run's page."""
    counts = []
    if plan is not None:
        counts.append(f"{len(plan.deletions)} of {len(plan.decisions)} checkpoints")
    if leftovers or plan is None:
        count = sum(not each.keep for each in leftovers)
        counts.append(f"{count} of {len(leftovers)} uploads that were never committed")
    keeping = f", keeping {plan.policy}" if plan is not None else ""
    create_table_artifact(
        [*(plan.rows() if plan is not None else []), *(each.row() for each in leftovers)],
        key=unique_slug(f"prune-{experiment}"),
        description=f"{'Would delete' if dry_run else 'Deletes'} {' and '.join(counts)} "
        f"({_freed_bytes(plan, leftovers) / 2**20:.1f} MiB){keeping}",
    )
