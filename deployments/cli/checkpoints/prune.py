"""`trialflow checkpoints prune`: deleting what the rules do not keep, and what killed runs left."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import CheckpointNotFound, ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.checkpoints import prune_leftovers
from trialflow.deployments.cli.experiment_options import (
    ConfigFile,
    Overrides,
    Storage,
    open_store,
    read_experiment,
)
from trialflow.deployments.cli.tables import AsJson, local_time, print_table, shortest_unique

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.retention.leftovers import Leftover, SweptLeftovers
    from trial_core.retention.policy import RetentionDecision, RetentionPolicy
    from trial_core.retention.pruning import Pruned, PruningPlan


@Parameter(name="*")
@dataclass(frozen=True)
class Rules:
    """What to keep, over what --config says.

    Attributes:
        save_trial_best: Keep so many of the best checkpoints of each trial (1, once another
            rule is given).
        save_trial_latest: Keep so many of the latest checkpoints of each trial (1, likewise).
        save_experiment_best: Keep so many of the best checkpoints of all trials together (0).
        keep_every_batches: Keep the first at or after each multiple of so many batches.
        keep_every_epochs: Likewise, of so many epochs.
        metric: The validation metric that says what is best.
        smaller_is_better: Which way it improves.
    """

    save_trial_best: int | None = None
    save_trial_latest: int | None = None
    save_experiment_best: int | None = None
    keep_every_batches: int | None = None
    keep_every_epochs: int | None = None
    metric: str | None = None
    smaller_is_better: Annotated[bool | None, Parameter(negative="--larger-is-better")] = None

    def of_storage(self) -> dict[str, Any]:
        """Those that belong to an experiment's `checkpoint_storage`."""
        units = {"batches": self.keep_every_batches, "epochs": self.keep_every_epochs}
        every = {unit: number for unit, number in units.items() if number is not None}
        named = {
            "save_trial_best": self.save_trial_best,
            "save_trial_latest": self.save_trial_latest,
            "save_experiment_best": self.save_experiment_best,
            "keep_every": every or None,
        }
        return {name: value for name, value in named.items() if value is not None}


def prune(
    *,
    experiment: Annotated[
        str | None,
        Parameter(help="Prune this experiment; by default that of --config, else every one."),
    ] = None,
    trial: Annotated[str | None, Parameter(help="Prune this trial alone.")] = None,
    rules: Rules | None = None,
    dry_run: Annotated[bool, Parameter(help="Only say what would be deleted, and why.")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="Delete without asking.")] = False,
    leftovers_only: prune_leftovers.Only = False,
    leftovers_after_days: prune_leftovers.AfterDays = prune_leftovers.AFTER_DAYS,
    config: ConfigFile = None,
    set_: Overrides = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Delete the checkpoints that the rules do not keep: shows them, asks, deletes.

    The rules are those of --config's checkpoint_storage, and those given here. Never deleted is
    what somebody has pinned, what the registry holds (a model's champion and the one before), and
    what a run that is under way has started from or would go on from.

    With them goes what killed runs have begun to upload and never committed, once their trials
    have shown no sign of life for a while.
    """
    if json_ and not (dry_run or yes):
        raise ConfigError("--json asks no questions: give --dry-run or --yes as well")
    if set_ and config is None:
        raise ConfigError("--set changes what --config says: give --config as well")
    store, policy, name = _asked_for(config, set_ or [], storage, rules or Rules())
    if policy is None and not leftovers_only:
        raise ConfigError(
            "nothing says which checkpoints to keep, so all are kept: give rules in "
            "checkpoint_storage of --config, or here (--save-trial-latest 1, …; see --help); or "
            "--leftovers-only"
        )
    left = prune_leftovers.find(store, leftovers_after_days, trial, experiment or name)
    plans = []
    if policy is not None and not leftovers_only:
        plans = _plan(store, policy, experiment or name, trial, is_known=bool(left))
    if not json_ and not plans and not left:
        print(f"no {'leftovers' if leftovers_only else 'checkpoints'} in {store.url}")
    elif not json_:
        _print_plans(plans, left)
    pruned, swept = None, None
    if not dry_run and (yes or _confirmed(plans, left)):
        pruned = _delete(store, plans, is_silent=json_)
        swept = prune_leftovers.delete(store, left, leftovers_after_days, is_silent=json_)
    if json_:
        print(json.dumps(_as_json(policy, plans, left, pruned, swept), indent=2))
    return 0


def _asked_for(
    config: Path | None, overrides: list[str], storage: str | None, rules: Rules
) -> tuple[CheckpointStore, RetentionPolicy | None, str | None]:
    """Where to prune by which rules, if any, and the experiment that was named by its file.

    Raises:
        ConfigError: the file or a rule is wrong.
    """
    from pydantic import ValidationError

    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import StorageConfig, error_lines

    metric, smaller_is_better, name, place = rules.metric, rules.smaller_is_better, None, None
    if config is not None:
        said = read_experiment(config, overrides, storage)
        name, place = said.name, said.checkpoint_storage
        metric = metric or said.searcher.metric
        if smaller_is_better is None:
            smaller_is_better = said.searcher.smaller_is_better
    given = {} if place is None else place.model_dump(exclude_none=True)
    try:
        merged = StorageConfig.model_validate({**given, **rules.of_storage()})
    except ValidationError as error:
        raise ConfigError("\n".join(f"rules: {line}" for line in error_lines(error))) from None
    policy = merged.retention(metric, smaller_is_better is not False)
    if place is None:
        return open_store(None, storage), policy, None
    return CheckpointStore(place.url, place.options), policy, name


def _plan(
    store: CheckpointStore,
    policy: RetentionPolicy,
    experiment: str | None,
    trial: str | None,
    is_known: bool,
) -> list[PruningPlan]:
    """A plan for each experiment.

    Args:
        is_known: there is something of that experiment and trial, though it may be no checkpoint.

    Raises:
        CheckpointNotFound: nothing there is called so.
    """
    from trial_core.retention.pruning import experiments, plan_pruning

    there = experiments(store)
    if experiment is not None and experiment not in there:
        if is_known:
            return []
        shown = ", ".join(there) or "none"
        raise CheckpointNotFound(
            f"no checkpoint in {store.url} is of experiment {experiment!r}; there is: {shown}"
        )
    names = there if experiment is None else [experiment]
    plans = [plan_pruning(store, policy, name, trial=trial) for name in names]
    plans = [plan for plan in plans if plan.decisions]
    if trial is not None and not plans and not is_known:
        raise CheckpointNotFound(f"trial {trial!r} has no checkpoint in {store.url}")
    return plans


def _print_plans(plans: list[PruningPlan], left: list[Leftover]) -> None:
    if plans:
        _print_decisions(plans)
    if plans and left:
        print()
    if left:
        prune_leftovers.show(left)


def _print_decisions(plans: list[PruningPlan]) -> None:
    decisions = [decision for plan in plans for decision in plan.decisions]
    print(f"keeping {plans[0].policy}\n")
    length = shortest_unique([decision.manifest.uuid for decision in decisions])
    columns = ("action", "uuid", "trial", "batches", "saved", "size", "why")
    print_table(columns, (_cells(decision, length) for decision in decisions))
    print(f"\n{_total(plans)}")


def _cells(decision: RetentionDecision, length: int) -> tuple[str, ...]:
    manifest = decision.manifest
    return (
        "keep" if decision.keep else "delete",
        manifest.uuid[:length],
        manifest.trial,
        str(manifest.progress.batches_trained),
        local_time(manifest.created_at),
        text_format.size(manifest.total_bytes),
        decision.why,
    )


def _total(plans: list[PruningPlan]) -> str:
    count = sum(len(plan.decisions) for plan in plans)
    size = text_format.size(sum(plan.freed_bytes for plan in plans))
    return f"to delete: {_deletions(plans)} of {text_format.plural(count, 'checkpoint')}, {size}"


def _deletions(plans: list[PruningPlan]) -> int:
    return sum(len(plan.deletions) for plan in plans)


def _confirmed(plans: list[PruningPlan], left: list[Leftover]) -> bool:
    """Whether the user wants it.

    Raises:
        ConfigError: there is nobody to ask.
    """
    counts = {"checkpoint": _deletions(plans), "leftover": sum(not each.keep for each in left)}
    shown = " and ".join(text_format.plural(count, noun) for noun, count in counts.items() if count)
    if not shown:
        return True  # what others have begun to delete is finished
    if not sys.stdin.isatty():
        raise ConfigError("nothing was deleted: give --yes to delete, or --dry-run to look only")
    try:
        answer = input(f"delete {shown}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    console.note("nothing was deleted")
    return False


def _delete(store: CheckpointStore, plans: list[PruningPlan], is_silent: bool) -> list[Pruned]:
    from trial_core.retention.pruning import prune as carry_out

    def say(decision: RetentionDecision) -> None:
        if not is_silent:
            print(f"deleted {decision.manifest.uuid}", flush=True)

    pruned = [carry_out(store, plan, say) for plan in plans]
    for decision in (decision for each in pruned for decision in each.spared):
        console.warning(f"{decision.manifest.uuid} stays: {decision.why}")
    return pruned


def _as_json(
    policy: RetentionPolicy | None,
    plans: list[PruningPlan],
    left: list[Leftover],
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
        "leftovers": [leftover.row() for leftover in left],
        "swept": [each.uuid for each in swept.swept if each.uuid] if swept is not None else [],
        "freed_bytes": freed_bytes + (swept.freed_bytes if swept is not None else 0),
    }
