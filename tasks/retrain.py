"""The tasks of the flow `retrain`: plan, register, compare, promote, send the event, callbacks.

Each task runs once per flow run: `trial_core.models.journal` keeps its result for later attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.retention_policy import own_metric
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig, StorageConfig
from trial_core.config.yaml_file import merged
from trial_core.driver.entrypoint_check import checked_entrypoint
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    PromotionConflict,
    PromotionRefused,
    TrialflowError,
)
from trial_core.models.data_templates import check_plain_data, render_data
from trial_core.models.journal import (
    Challenger,
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.promotion_rule import PromotionRule
from trial_core.models.records import Version
from trial_core.models.registry import Registry
from trial_core.processes.machine.function_process import call_function, log_lines
from trial_core.processes.machine.run_dirs import run_dir_of, trial_id
from trial_core.schedule.stop_requests import StopHandler
from trial_core.search.settings import SearchExperiment
from trialflow.tasks.events import outcome_event, send, tell_champion
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, TRANSFER

LOGS = "logs"


class CallbackFailed(TrialflowError):
    """A callback of a retraining failed. Everything else was done."""


class RetrainingRun:
    """One retraining, over all its attempts.

    Attributes:
        config: the experiment, with unrendered data.
        place: its storage section, without credentials of a block: runs below this one store it.
        run_id: the id of the flow run, or of the call of a subflow; the same for all attempts.
        journal: the results of completed stages.
    """

    def __init__(
        self, config: ExperimentConfig, run_id: str, place: StorageConfig | None = None
    ) -> None:
        storage, searcher = config.checkpoint_storage, config.searcher
        self.place = place or storage
        self.config = config
        self.settings = config.effective_retraining()
        self.model = self.settings.model
        self.rule = PromotionRule(searcher.metric, searcher.smaller_is_better, self.settings.margin)
        self.store = CheckpointStore(storage.url, storage.options)
        self.registry = Registry(self.store)
        self.run_id = run_id
        self.journal = Journal(self.store, self.model, run_id)

    @property
    def folder(self) -> Path:
        """The folder of the challenger's trial on this machine."""
        return run_dir_of(trial_id(self.config.name, self.run_id))

    def champion_config(self, plan: RetrainingPlan, champion: Version) -> ExperimentConfig:
        """The experiment with the champion's entrypoint and hyperparameters, and the run's data.

        Raises TrialError: see `checked_entrypoint`; not if the checkpoint's code is asked for.
        """
        manifest, own = self.store.open(champion.checkpoint), self.config
        if own.environment.code != "from_checkpoint":
            checked_entrypoint(manifest.entrypoint, own.entrypoint, own.code, self.store.url)
        config = own
        if isinstance(own, SearchExperiment):
            config = own.of_trial(manifest.hyperparameters, plan.trial)
        return config.model_copy(
            update={
                "data": plan.data,
                "entrypoint": manifest.entrypoint,
                "hyperparameters": manifest.hyperparameters,
            }
        )

    def challenger_config(self, plan: RetrainingPlan, champion: Version | None) -> ExperimentConfig:
        """The experiment with the run's data, started as `retraining.start` says."""
        config = self.config.model_copy(update={"data": plan.data})
        if champion is None or self.settings.start == "scratch":
            return config
        return config.starting_from(
            uuid=champion.checkpoint, weights_only=self.settings.start == "warm"
        )

    def has_promoted(self, plan: RetrainingPlan) -> bool:
        """Return whether an attempt at this run moved the aliases."""
        moves = self.registry.moves(self.model, after=plan.move)
        return any(move.run == self.run_id for move in moves)

    def callback_log(self, function: str) -> Path:
        return self.folder / LOGS / f"callback-{function.replace(':', '-')}.log"


@task(name="plan", task_run_name="plan", **TRANSFER)
def make_plan(
    retraining: RetrainingRun, scheduled_time: datetime, data: Mapping[str, Any] | None
) -> RetrainingPlan:
    """Plan the run, for all its attempts.

    Args:
        scheduled_time: the run's scheduled start.
        data: overrides the experiment's data; not rendered.

    Raises:
        ConfigError: a template cannot be rendered, `data` is not plain, or a callback is missing.
    """
    _check_callbacks(retraining)
    scheduled_time = scheduled_time.astimezone(timezone.utc)
    last_move = retraining.registry.last_move(retraining.model)
    plan = RetrainingPlan(
        trial=trial_id(retraining.config.name, retraining.run_id),
        scheduled_at=scheduled_time.isoformat(),
        begun_at=utc_now(),
        data=merged(
            render_data(retraining.config.data, scheduled_time), check_plain_data(data or {})
        ),
        champion=last_move.champion if last_move else None,
        move=last_move.number if last_move else 0,
    )
    plan = retraining.journal.write_plan(plan)
    champion = "no champion" if plan.champion is None else f"champion version {plan.champion}"
    get_run_logger().info("trial %s against %s, with data %s", plan.trial, champion, plan.data)
    return plan


@task(name="plan", task_run_name="plan", **TRANSFER)
def renew_plan(retraining: RetrainingRun, plan: RetrainingPlan) -> RetrainingPlan:
    """The plan of an earlier attempt; with the present champion if its own was never validated.

    A plan with a damaged champion would otherwise block the run forever.
    """
    journal, last_move = retraining.journal, retraining.registry.last_move(retraining.model)
    if plan.champion is None or last_move is None or last_move.champion == plan.champion:
        return plan
    is_started = (
        journal.read(plan.champion_record, Champion) is not None
        or journal.read("challenger", Challenger) is not None
    )
    if is_started:
        return plan
    note = f"planned with champion version {plan.champion}, not validated before {last_move}"
    get_run_logger().warning("%s", note)
    return journal.write_plan(
        msgspec.structs.replace(
            plan,
            champion=last_move.champion,
            move=last_move.number,
            renewed=plan.renewed + 1,
            note=note,
        )
    )


def _check_callbacks(retraining: RetrainingRun) -> None:
    """Refuse missing callbacks now, not after the training."""
    for number, function in enumerate(retraining.settings.callbacks):
        problem = _call_callback(retraining, function, None)
        if problem:
            raise ConfigError(
                f"retraining.callbacks[{number}]: {function} cannot be imported: {problem}"
            )


@task(name="register", task_run_name="register", **TRANSFER)
def register_challenger(retraining: RetrainingRun, trial: str) -> Challenger:
    """Register the best checkpoint of the challenger's trial as a version of the model."""
    rule, manifests = retraining.rule, retraining.store.resume_candidates(trial)
    best = rule.best_checkpoint(manifests)
    if best is None:
        return Challenger(why_none=rule.explain_no_best(manifests))
    value = own_metric(best, rule.metric)
    version = retraining.registry.register(
        retraining.model, best, metric=rule.metric, smaller_is_better=rule.smaller_is_better,
        value=value, run=retraining.run_id,
    )  # fmt: skip
    get_run_logger().info("checkpoint %s is %s", best.uuid, version)
    return Challenger(
        version=version.number,
        checkpoint=best.uuid,
        batches_trained=best.progress.batches_trained,
        metrics=best.metrics.get("validation", {}),
        value=value,
    )


@task(name="compare", task_run_name="compare", cache_policy=NO_CACHE)
def compare(
    retraining: RetrainingRun, champion: Champion | None, challenger: Challenger
) -> PromotionDecision:
    """Compare the challenger with the champion on the same data, and decide on a promotion."""
    if challenger.value is None:
        return PromotionDecision(promoted=False, why=challenger.why_none)
    verdict = retraining.rule.compare(champion.value if champion else None, challenger.value)
    get_run_logger().info("%s", verdict.why)
    return PromotionDecision(promoted=verdict.is_better, why=verdict.why)


@task(name="promote", task_run_name="promote", **TRANSFER)
def promote_challenger(
    retraining: RetrainingRun,
    plan: RetrainingPlan,
    challenger: Challenger,
    verdict: PromotionDecision,
) -> PromotionDecision:
    """Promote the challenger if it is better. Returns the outcome.

    If an attempt at this run was killed after its promotion, this makes no second move.
    """
    if not verdict.promoted or challenger.version is None or retraining.has_promoted(plan):
        return verdict
    try:
        move = retraining.registry.promote(
            retraining.model, challenger.version, run=retraining.run_id, why=verdict.why,
            expected_champion=plan.champion,
        )  # fmt: skip
    except PromotionConflict as conflict:
        if retraining.has_promoted(plan):  # by an attempt that was presumed dead
            return verdict
        why = f"the champion has changed since the plan: {conflict}"
    except (CheckpointDamaged, CheckpointNotFound, PromotionRefused) as error:
        why = f"the challenger's checkpoint cannot be used: {error}"
    else:
        tell_champion(retraining.registry, move, retraining.config)
        return verdict
    get_run_logger().warning("version %d is not promoted: %s", challenger.version, why)
    return PromotionDecision(promoted=False, why=f"{why} (the verdict was: {verdict.why})")


@task(
    name="send-event", task_run_name="send-event", cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES, retry_delay_seconds=STORAGE_RETRY_SECONDS,
)  # fmt: skip
def send_event(retraining: RetrainingRun, outcome: Mapping[str, Any]) -> None:
    """Send the event of the outcome. Raises httpx.HTTPError if the server did not accept it."""
    event = outcome_event(retraining.model, retraining.run_id, outcome)
    with get_client(sync_client=True) as client:
        send(client, event)
    get_run_logger().info("sent event %s", event.event)


@task(name="callback", task_run_name="callback {function}", cache_policy=NO_CACHE)
def run_callback(
    retraining: RetrainingRun, function: str, outcome: Mapping[str, Any], stopping: StopHandler
) -> str | None:
    """Call one of the experiment's callbacks. Return its failure, or None if it succeeded."""
    should_cancel = grace_timer(stopping, retraining.config.stopping.grace_seconds)
    problem = _call_callback(retraining, function, outcome, should_cancel)
    logger = get_run_logger()
    for line in log_lines(retraining.callback_log(function)):
        logger.info("[%s] %s", function, line)
    if problem:
        logger.error("callback %s failed: %s", function, problem)
    return problem


def _call_callback(
    retraining: RetrainingRun,
    function: str,
    outcome: Mapping[str, Any] | None,
    should_cancel: Callable[[], bool] = lambda: False,
) -> str | None:
    """Call a callback in a process; without `outcome`, only import it. Return its failure."""
    try:
        return call_function(
            function, outcome,
            code=retraining.config.code,
            log=retraining.callback_log(function),
            environment=retraining.config.environment.environment_variables,
            timeout_seconds=retraining.settings.callback_timeout_seconds,
            should_cancel=should_cancel,
        )  # fmt: skip
    except OSError as error:  # no process, or no code folder on this machine
        return str(error)


def grace_timer(stopping: StopHandler, grace_seconds: float) -> Callable[[], bool]:
    """Return a function that tells if a stop was requested and its grace period is over.

    The period starts when the function first sees the request. `StopHandler` itself has a deadline
    for urgent requests only, and a callback may take any time.
    """
    first_seen: list[float] = []

    def is_over() -> bool:
        if stopping.request is not None and not first_seen:
            first_seen.append(time.monotonic())
        is_late = bool(first_seen) and time.monotonic() - first_seen[0] >= grace_seconds
        return is_late or stopping.has_expired

    return is_over
