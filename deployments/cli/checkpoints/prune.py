"""`trialflow checkpoints prune`: deletes checkpoints that no rule keeps, and leftovers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import CheckpointNotFound, ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED,
    Changes,
    StoragePlace,
    open_store_of,
    read_any_experiment,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.tables import local_time, print_table, shortest_unique
from trialflow.deployments.cli.waiting import print_above_the_wait, waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.retention.leftovers import Leftover, SweptLeftovers
    from trial_core.checkpoint.retention.pruning import Pruned, PruningPlan
    from trial_core.checkpoint.retention_policy import RetentionPolicy
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig

LEFTOVERS_AFTER_DAYS = 7.0
"""`leftovers.LEFTOVER_AGE_DAYS`, which `--help` shows without importing it."""


@Parameter(name="*")
@dataclass(frozen=True)
class Rules:
    """Retention rules; they override the rules of --config.

    Attributes:
        save_trial_best: Keep the N best checkpoints of each trial. Default: 1 if any rule is set.
        save_trial_latest: Keep the N latest checkpoints of each trial. Default: 1 if any rule is
            set.
        save_experiment_best: Keep the N best checkpoints of all trials together. Default: 0.
        keep_every_batches: Keep the first checkpoint at or after each multiple of N batches.
            Default: no such rule.
        keep_every_epochs: Keep the first checkpoint at or after each multiple of N epochs. Default:
            no such rule.
        metric: The validation metric that decides which checkpoint is best. Default: the metric of
            --config; without one, all validated checkpoints count as best.
        smaller_is_better: A smaller value of the metric is better. Default: as --config says, else
            smaller.
    """

    save_trial_best: int | None = None
    save_trial_latest: int | None = None
    save_experiment_best: int | None = None
    keep_every_batches: int | None = None
    keep_every_epochs: int | None = None
    metric: str | None = None
    smaller_is_better: Annotated[bool | None, Parameter(negative="--larger-is-better")] = None

    def policy(self, experiment: ExperimentConfig | None) -> RetentionPolicy | None:
        """Return the policy of these rules over an experiment's rules; None if neither sets one.

        Raises:
            ConfigError: a rule is wrong.
        """
        from pydantic import ValidationError

        from trial_core.config import StorageConfig, error_lines

        metric, smaller_is_better = self.metric, self.smaller_is_better
        of_experiment: dict[str, Any] = {}
        if experiment is not None:
            of_experiment = experiment.checkpoint_storage.model_dump(exclude_none=True)
            metric = metric or experiment.searcher.metric
            if smaller_is_better is None:
                smaller_is_better = experiment.searcher.smaller_is_better
        try:
            merged = StorageConfig.model_validate({**of_experiment, **self._as_fields()})
        except ValidationError as error:
            raise ConfigError("\n".join(f"rules: {line}" for line in error_lines(error))) from None
        is_continuous = experiment is not None and experiment.saves_continuously
        return merged.retention(metric, smaller_is_better is not False, is_continuous)

    def _as_fields(self) -> dict[str, Any]:
        """The rules that are set, as fields of `checkpoint_storage`."""
        units = {"batches": self.keep_every_batches, "epochs": self.keep_every_epochs}
        every = {unit: number for unit, number in units.items() if number is not None}
        same = ("save_trial_best", "save_trial_latest", "save_experiment_best")
        fields = {**{name: getattr(self, name) for name in same}, "keep_every": every or None}
        return {name: value for name, value in fields.items() if value is not None}


def prune(
    *,
    experiment: str | None = None,
    trial: str | None = None,
    rules: Rules | None = None,
    dry_run: bool = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"])] = False,
    leftovers_only: bool = False,
    leftovers_after_days: float = LEFTOVERS_AFTER_DAYS,
    config: Path | None = None,
    changes: Changes = UNCHANGED,
    json_: AsJson = False,
) -> None:
    """Delete the checkpoints that no rule keeps. Shows them and asks first.

    The rules come from checkpoint_storage in --config and from the options below. Pinned
    checkpoints, checkpoints held by the registry (champion and previous), and checkpoints that a
    running trial needs are never deleted.

    Also deletes leftovers: files that killed runs uploaded and never committed.

    Args:
        experiment: Prune this experiment. Default: that of --config, else all.
        trial: Prune only this trial. Default: all trials.
        dry_run: Show what would be deleted; delete nothing.
        yes: Delete without asking.
        leftovers_only: Delete only leftovers of killed runs. Needs no rules.
        leftovers_after_days: Delete leftovers of trials that have been inactive for N days.
        config: Experiment file; its checkpoint_storage and its rules are used. Default: none; where
            there is an experiment.yaml, give --config or --storage.
    """
    from trial_core.checkpoint.retention.leftovers import find_leftovers

    if json_ and not (dry_run or yes):
        raise ConfigError("--json cannot ask for confirmation: give --dry-run or --yes as well")
    if config is None and changes.storage is None and DEFAULT_EXPERIMENT.exists():
        raise ConfigError(
            "say which storage to prune: --config experiment.yaml (its storage, by its rules) or "
            "--storage; nothing is deleted by a file that was not named"
        )
    if changes.set_ and config is None:
        raise ConfigError("--set changes a field of --config: give --config as well")
    of_config = None if config is None else read_any_experiment(config, changes)
    place = StoragePlace(storage=changes.storage)
    store = place.open_store() if of_config is None else open_store_of(of_config)
    policy = (rules or Rules()).policy(of_config)
    if policy is None and not leftovers_only:
        raise ConfigError(
            "no rule says which checkpoints to keep, so all are kept: set rules in "
            "checkpoint_storage of --config, or here (--save-trial-latest 1, …; see --help), or "
            "give --leftovers-only"
        )
    if experiment is None and of_config is not None:
        experiment = of_config.name
    plans = []
    with waiting(f"reading {store.url}"):
        leftovers = find_leftovers(
            store, after_days=leftovers_after_days, trial=trial, experiment=experiment
        )
        if policy is not None and not leftovers_only:
            plans = _plans(store, policy, experiment, trial, has_leftovers=bool(leftovers))
    if not json_:
        _print_what_is_there(store, plans, leftovers, leftovers_only)
    pruned, swept = None, None
    if not dry_run and (yes or _is_confirmed(plans, leftovers)):
        with waiting(f"deleting in {store.url}"):
            say = (lambda text: None) if json_ else print_above_the_wait
            pruned = _delete(store, plans, say)
            swept = _sweep(store, leftovers, leftovers_after_days, say)
    if json_:
        print_json("checkpoints prune", _as_json(policy, plans, leftovers, pruned, swept))


def _plans(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str | None,
    trial: str | None,
    has_leftovers: bool,
) -> list[PruningPlan]:
    """A plan for each experiment.

    Args:
        has_leftovers: True if that experiment and trial have leftovers, even without checkpoints.

    Raises:
        CheckpointNotFound: the storage has nothing of that experiment or trial.
    """
    from trial_core.checkpoint.retention.pruning import experiments, plan_pruning

    stored = experiments(store)
    if experiment is not None and experiment not in stored:
        if has_leftovers:
            return []
        raise CheckpointNotFound(
            f"no checkpoint in {store.url} is of experiment {experiment!r}; "
            f"the storage has: {', '.join(stored) or 'none'}"
        )
    names = stored if experiment is None else [experiment]
    plans = [plan_pruning(store, policy, name, trial=trial) for name in names]
    plans = [plan for plan in plans if plan.decisions]
    if trial is not None and not plans and not has_leftovers:
        raise CheckpointNotFound(f"trial {trial!r} has no checkpoint in {store.url}")
    return plans


def _print_what_is_there(
    store: CheckpointStore,
    plans: list[PruningPlan],
    leftovers: list[Leftover],
    leftovers_only: bool,
) -> None:
    if not plans and not leftovers:
        print(f"no {'leftovers' if leftovers_only else 'checkpoints'} in {store.url}")
    if plans:
        _print_plans(plans)
    if plans and leftovers:
        print()
    if leftovers:
        _print_leftovers(leftovers)


def _print_plans(plans: list[PruningPlan]) -> None:
    decisions = [decision for plan in plans for decision in plan.decisions]
    print(f"keeping {plans[0].policy}\n")
    length = shortest_unique([decision.manifest.uuid for decision in decisions])
    rows = [
        (
            "keep" if decision.keep else "delete",
            manifest.uuid[:length],
            manifest.trial,
            str(manifest.progress.batches_trained),
            local_time(manifest.created_at),
            text_format.size(manifest.total_bytes),
            decision.why,
        )
        for decision, manifest in ((each, each.manifest) for each in decisions)
    ]
    print_table(("action", "uuid", "trial", "batches", "saved", "size", "why"), rows)
    size = text_format.size(sum(plan.freed_bytes for plan in plans))
    count = text_format.plural(len(decisions), "checkpoint")
    print(f"\nto delete: {_deletions(plans)} of {count}, {size}")


def _print_leftovers(leftovers: list[Leftover]) -> None:
    print("uploads that were never committed:\n")
    length = shortest_unique([each.uuid for each in leftovers])
    rows = [
        (
            "keep" if each.keep else "delete",
            each.uuid[:length],
            each.trial or "?",
            local_time(each.begun_at) if each.begun_at else "?",
            str(each.files),
            text_format.size(each.size_bytes),
            each.why,
        )
        for each in leftovers
    ]
    print_table(("action", "uuid", "trial", "begun", "files", "size", "why"), rows)
    deleted = [each for each in leftovers if not each.keep]
    size = text_format.size(sum(each.size_bytes for each in deleted))
    count = text_format.plural(len(leftovers), "leftover")
    print(f"\nto delete: {len(deleted)} of {count}, {size}")


def _deletions(plans: list[PruningPlan]) -> int:
    return sum(len(plan.deletions) for plan in plans)


def _is_confirmed(plans: list[PruningPlan], leftovers: list[Leftover]) -> bool:
    """Ask whether to delete. Raises ConfigError if stdin is not a terminal."""
    counts = {"checkpoint": _deletions(plans), "leftover": sum(not each.keep for each in leftovers)}
    shown = " and ".join(text_format.plural(count, noun) for noun, count in counts.items() if count)
    if not shown:
        return True  # nothing new to delete; interrupted deletions are completed
    return console.is_confirmed(f"delete {shown}", "deleted", "; or --dry-run to see the plan")


def _delete(
    store: CheckpointStore, plans: list[PruningPlan], say: Callable[[str], None]
) -> list[Pruned]:
    from trial_core.checkpoint.retention.deletion_markers import finish_deletions
    from trial_core.checkpoint.retention.pruning import prune as carry_out

    if not plans:  # else the first one's prune does it
        finish_deletions(store)
    pruned = [
        carry_out(store, plan, lambda decision: say(f"deleted {decision.manifest.uuid}"))
        for plan in plans
    ]
    for decision in (decision for each in pruned for decision in each.spared):
        console.warning(f"{decision.manifest.uuid} was not deleted: {decision.why}")
    return pruned


def _sweep(
    store: CheckpointStore, leftovers: list[Leftover], after_days: float, say: Callable[[str], None]
) -> SweptLeftovers:
    from trial_core.checkpoint.retention.leftovers import sweep_leftovers

    swept = sweep_leftovers(
        store, leftovers, after_days=after_days, on_swept=lambda each: say(f"deleted {each}")
    )
    for trial, why in swept.spared.items():
        console.warning(f"leftovers of trial {trial} were not deleted: {why}")
    return swept


def _as_json(
    policy: RetentionPolicy | None,
    plans: list[PruningPlan],
    leftovers: list[Leftover],
    pruned: list[Pruned] | None,
    swept: SweptLeftovers | None,
) -> dict[str, Any]:
    done = pruned or []
    freed_bytes = sum(each.freed_bytes for each in done)
    return {
        "policy": None if policy is None else str(policy),
        "plan": [{"experiment": plan.experiment, **row} for plan in plans for row in plan.rows()],
        "is_dry_run": pruned is None,
        "deleted": [manifest.uuid for each in done for manifest in each.deleted],
        "spared": {d.manifest.uuid: d.why for each in done for d in each.spared},
        "leftovers": [leftover.row() for leftover in leftovers],
        "swept": [each.uuid for each in swept.swept if each.uuid] if swept is not None else [],
        "freed_bytes": freed_bytes + (swept.freed_bytes if swept is not None else 0),
    }
