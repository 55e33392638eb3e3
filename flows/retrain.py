"""The flow `retrain`: trains a challenger and promotes it if it is better than the champion.

`retrain` guards a run: not too late, one per model, on free GPUs, until it is stopped.
`retrain_model` is the retraining, stage by stage. Every stage stores its result in the journal, so
a later attempt continues behind it (`trial_core.models.journal`).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated, Any
from uuid import UUID

import msgspec
from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed

from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.storage_mark import marked
from trial_core.common import text_format
from trial_core.config import ExperimentConfig
from trial_core.driver.code_source import refuse_missing_code
from trial_core.driver.run import Given
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CommitConflict,
    RankFailed,
    Stalled,
    TrialError,
    TrialflowError,
)
from trial_core.models.journal import (
    REPORT,
    Challenger,
    Champion,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.records import Version
from trial_core.observe.report.retraining_report import RetrainingFacts
from trial_core.schedule.sequencer import searcher_metric
from trial_core.schedule.stop_requests import StopHandler
from trial_core.search.search import sampler_of
from trial_core.search.settings import EitherExperiment, SearchExperiment, check_retraining
from trialflow.flows.evaluate import EvaluateResult, evaluate_checkpoint
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.parent_runs import identity_of_run
from trialflow.flows.lifecycle.run_log import about, readable_task_log
from trialflow.flows.lifecycle.run_names import retrain_name
from trialflow.flows.lifecycle.shared_gpus import gpu_slots
from trialflow.flows.lifecycle.stop_monitor import StopMonitor
from trialflow.flows.lifecycle.storage_of_run import StorageLabel, storage_of_run
from trialflow.flows.retraining.model_lock import FLOW, AlreadyRetraining, model_lock
from trialflow.flows.retraining.outcome import (
    RetrainResult,
    describe_decision,
    ending_at_time_budget,
    notify,
    publish_report,
    report_failure,
    retrain_result,
)
from trialflow.flows.search import SearchRun, page_of
from trialflow.flows.train import takeover_wait_seconds, train_trial
from trialflow.tasks.artifact import ReportArtifact
from trialflow.tasks.required_experiment import GIVEN, MISSING, experiment_form
from trialflow.tasks.retrain import (
    RetrainingRun,
    compare,
    make_plan,
    promote_challenger,
    register_challenger,
    renew_plan,
)
from trialflow.tasks.storage_block import with_credentials

SKIPPED = "Skipped"


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@experiment_form(config="Experiment", data="Data of this run")
@flow(name=FLOW, flow_run_name=retrain_name, validate_parameters=True)
def retrain(
    config: Annotated[EitherExperiment, GIVEN] = MISSING, data: dict[str, Any] | None = None
) -> RetrainResult | State[Any]:
    """Train a challenger on fresh data, and promote it if it is better than the champion.

    Args:
        config: the experiment; with `retraining.search` that of a search. Texts in its `data` are
            templates (`trial_core.models.data_templates`).
        data: overrides the experiment's `data` for this run; not rendered.

    Raises:
        ConfigError: the experiment names a script, or searches without `retraining.search`; a
            template cannot be rendered, `data` is not plain, or a callback or a sampler is missing.
        CheckpointDamaged, CheckpointNotFound: the champion's checkpoint cannot be validated.
        StorageError: it is not the storage that an earlier attempt of this flow run has used.
        CallbackFailed: a callback failed after the decision.
        RankFailed, Stalled, TrialError: see `train`.
        SearchError: see `search`.
    """
    config.require_trial("retrain")
    check_retraining(config)
    check_crash_limit(config.max_restarts)
    refuse_missing_code(config)
    if isinstance(config, SearchExperiment):
        sampler_of(config)  # raises before anything is stored
    opened = with_credentials(config)
    retraining = RetrainingRun(opened, identity_of_run(config), config.checkpoint_storage)
    # First: an empty folder would have no journal and no champion.
    expected = storage_of_run(config.stopping.server_outage_seconds)
    existing_plan = retraining.journal.plan()
    mark = marked(retraining.store.storage, expected, lambda: existing_plan is not None)
    if not retraining.store.is_process_local:
        StorageLabel().note(mark)
    scheduled_time: datetime = runtime.flow_run.scheduled_start_time
    if existing_plan is None and (lateness := describe_lateness(retraining, scheduled_time)):
        return Completed(name=SKIPPED, message=f"skipped: {lateness}")
    with ExitStack() as stack:
        flow_run_id = UUID(str(runtime.flow_run.id))
        lock = model_lock(retraining.model, flow_run_id, wait=existing_plan is not None)
        try:
            stack.enter_context(lock)
        except AlreadyRetraining as error:
            return Completed(name=SKIPPED, message=f"skipped: {error}")
        if existing_plan is None:
            plan = make_plan(retraining, scheduled_time, data)
        else:
            plan = renew_plan(retraining, existing_plan)
        stack.enter_context(readable_task_log())
        gpus = stack.enter_context(ExitStack())
        devices = gpus.enter_context(gpu_slots(config))
        stopping = stack.enter_context(StopHandler(config.stopping.grace_seconds))
        watch = stack.enter_context(StopMonitor(stopping, config.stopping))

        def work() -> RetrainResult:
            number, version = plan.champion, retraining.registry.version
            champion = None if number is None else version(retraining.model, number)
            attempt = RetrainingAttempt(retraining, plan, champion, stopping, devices, gpus.close)
            return retrain_model(attempt, watch.await_server)

        return watch.run(work, describe_decision)


def describe_lateness(retraining: RetrainingRun, scheduled_time: datetime) -> str | None:
    """Return why the run is too late to start, or None if it is not."""
    limit = retraining.settings.max_lateness_seconds
    late_seconds = (datetime.now(timezone.utc) - scheduled_time).total_seconds()
    if limit is None or late_seconds <= limit:
        return None
    return (
        f"scheduled for {scheduled_time:%Y-%m-%d %H:%M:%S %Z}, "
        f"{text_format.duration(late_seconds)} ago; retraining.max_lateness_seconds is {limit:g}"
    )


@dataclass(frozen=True)
class RetrainingAttempt:
    """One attempt at a retraining. The retraining and its plan are the same for all attempts.

    Attributes:
        champion: the version to compare with, or None if the model has no champion.
        devices: environment variables that assign accelerators to the ranks.
        give_back_gpus: lets other runs have the accelerators.
        began: when the attempt has begun, by the monotonic clock.
    """

    retraining: RetrainingRun
    plan: RetrainingPlan
    champion: Version | None
    stopping: StopHandler
    devices: Mapping[str, str]
    give_back_gpus: Callable[[], None] = lambda: None
    began: float = field(default_factory=time.monotonic)


def retrain_model(attempt: RetrainingAttempt, await_server: Callable[[], None]) -> RetrainResult:
    """Validate the champion, train the challenger, compare, promote, report, notify.

    Args:
        await_server: waits while the Prefect server, which receives the event, is away.
    """
    retraining, plan, stopping = attempt.retraining, attempt.plan, attempt.stopping
    champion = attempt.champion
    is_search = isinstance(retraining.config, SearchExperiment)
    own_report = page_of(plan.trial) if is_search else ReportArtifact(plan.trial)
    facts = RetrainingFacts(
        retraining.model, retraining.settings.start, retraining.rule, plan, champion,
        places={
            "the challenger's own report": f"artifact {own_report.key}",
            "runs on this machine": str(retraining.folder),
            "this report": retraining.journal.url(REPORT),
        },
    )  # fmt: skip
    with (
        # The challenger's trial has a claim under its own name while it trains.
        RunClaim(
            retraining.store, f"{plan.trial}-retraining", champion.checkpoint if champion else None
        ) as claim,
        report_failure(facts, retraining, stopping),
    ):
        with ending_at_time_budget(stopping):
            if champion is not None:
                facts.champion_result = retraining.journal.read_or_compute(
                    plan.champion_record, Champion, lambda: validate_champion(attempt, champion)
                )
            facts.challenger = trained_challenger(attempt)
            if facts.challenger is not None:
                claim_challenger(claim, retraining, facts.challenger)
                facts.outcome = decide(attempt, facts.champion_result, facts.challenger)
        if facts.outcome is None:
            facts.ended = f"stopped: {stopping.final_request()}"
        report = publish_report(facts, retraining)
        result = retrain_result(facts, str(runtime.flow_run.id), report, stopping)
        if facts.outcome is not None:
            await_server()
            notify(retraining, facts, result, stopping)
    return result


def validate_champion(attempt: RetrainingAttempt, champion: Version) -> Champion:
    """Validate the champion on the run's data and slots.

    Raises:
        CheckpointDamaged, CheckpointNotFound: its checkpoint cannot be used.
    """
    retraining = attempt.retraining
    try:
        config = retraining.champion_config(attempt.plan, champion)
        with about(f"champion (version {champion.number})"):
            result = evaluate_with_restarts(attempt, config, champion.checkpoint)
    except (CheckpointDamaged, CheckpointNotFound) as error:
        raise type(error)(
            f"the champion, {champion}, cannot be validated, so nothing was trained: {error}; "
            f"make the previous champion champion again with `trialflow models rollback "
            f"{champion.model}`, then retry this run, which will compare with that version"
        ) from error
    except (RankFailed, TrialError):
        get_run_logger().error(
            "the champion, %s, cannot be validated: if its code has changed, restore the code or "
            "promote another version (`trialflow models promote`)", champion,
        )  # fmt: skip
        raise
    value = searcher_metric(result.metrics, retraining.rule.metric)
    return Champion(metrics=result.metrics, value=value)


def evaluate_with_restarts(
    attempt: RetrainingAttempt, config: ExperimentConfig, checkpoint: str
) -> EvaluateResult:
    """Evaluate a checkpoint; restart up to `max_restarts` times if ranks die or hang.

    A rank that raised an exception would raise it again, so it is not restarted.
    """
    run_id, stopping, restarts = attempt.retraining.run_id, attempt.stopping, 0
    while True:
        try:
            return evaluate_checkpoint(config, checkpoint, run_id, stopping, attempt.devices)
        except (RankFailed, Stalled) as failure:
            has_raised = isinstance(failure, RankFailed) and failure.error_type is not None
            if has_raised or stopping.request is not None or restarts == config.max_restarts:
                raise
            restarts += 1
            get_run_logger().warning(
                "validating the champion again (restart %d of %d): %s",
                restarts, config.max_restarts, failure,
            )  # fmt: skip


def trained_challenger(attempt: RetrainingAttempt) -> Challenger | None:
    """Train and register the challenger; None if the training was stopped before its end.

    If the champion has changed since the plan, trains nothing: the challenger could not be
    promoted.
    """
    retraining, plan, journal = attempt.retraining, attempt.plan, attempt.retraining.journal
    existing = journal.read("challenger", Challenger)
    if existing is not None:
        return existing
    if change := describe_champion_change(retraining, plan):
        return journal.write("challenger", Challenger(why_none=f"{change}; nothing was trained"))
    config = retraining.challenger_config(plan, attempt.champion)
    if isinstance(config, SearchExperiment):
        found = searched_challenger(attempt, config)
        return None if found is None else journal.write("challenger", found)
    given = Given(
        attempt=retraining.run_id, stopping=attempt.stopping, devices=attempt.devices,
        is_new=True, takeover_wait_seconds=takeover_wait_seconds(config), task="a retraining",
    )  # fmt: skip
    with about("challenger"):
        result = train_trial(config, plan.trial, given)
    # A trial may also end its training early by itself.
    if result.stopped_early and attempt.stopping.request is not None:
        return None
    return journal.write("challenger", register_challenger(retraining, plan.trial))


def searched_challenger(attempt: RetrainingAttempt, config: SearchExperiment) -> Challenger | None:
    """Continue the plan's search to its end, and register its best trial; None if it was stopped.

    Raises:
        TrialflowError: trainings were stopped, but this run was not.
        SearchError: see `search`.
    """
    retraining, search, stopping = attempt.retraining, attempt.plan.trial, attempt.stopping
    attempt.give_back_gpus()  # each trial waits for its own
    config = config.model_copy(update={"checkpoint_storage": retraining.place})
    sampler, owner = sampler_of(config), retraining.run_id
    run = SearchRun(config, search, owner, retraining.store, stopping, sampler, attempt.began)
    result = run.run(is_new=True, take_over=False)
    if not result.is_over and stopping.request is not None:
        return None
    if not result.is_over:
        raise TrialflowError(
            f"search {search} is not over: {result.stop_reason}; retry this run, which continues it"
        )
    if result.best_trial is None:
        challenger = Challenger(why_none=f"no trial of search {search} has a finite metric")
    else:
        challenger = register_challenger(retraining, result.best_trial)
    return msgspec.structs.replace(
        challenger, trial=result.best_trial or "", trials=result.trials,
        hyperparameters=result.hyperparameters,
    )  # fmt: skip


def claim_challenger(claim: RunClaim, retraining: RetrainingRun, challenger: Challenger) -> None:
    """Protect the challenger's checkpoint until it is promoted or not.

    Only warns if the checkpoint is deleted: the promotion then refuses it.
    """
    if challenger.checkpoint is None:
        return
    try:
        claim.renew(retraining.store.open(challenger.checkpoint).name)
    except (CheckpointNotFound, CheckpointDamaged, CommitConflict) as error:
        get_run_logger().warning("the challenger's checkpoint is not claimed: %s", error)


def describe_champion_change(retraining: RetrainingRun, plan: RetrainingPlan) -> str | None:
    """Return how the champion changed since the plan, or None if it did not."""
    last_move = retraining.registry.last_move(retraining.model)
    if (last_move.champion if last_move else None) == plan.champion:
        return None
    return f"the champion has changed since the plan: {last_move or 'there is none now'}"


def decide(
    attempt: RetrainingAttempt, champion: Champion | None, challenger: Challenger
) -> PromotionDecision | None:
    """Compare, and promote the challenger if it is better. Returns the outcome.

    Returns:
        None if the run was stopped before the promotion. A time budget that ends now, after the
        training, does not prevent it.
    """
    retraining, journal = attempt.retraining, attempt.retraining.journal
    existing = journal.read("outcome", PromotionDecision)
    if existing is not None:
        return existing
    verdict = journal.read_or_compute(
        "verdict", PromotionDecision, lambda: compare(retraining, champion, challenger)
    )
    stop = attempt.stopping.request
    if stop is not None and stop.reason != "time budget":
        return None
    return journal.write(
        "outcome", promote_challenger(retraining, attempt.plan, challenger, verdict)
    )
