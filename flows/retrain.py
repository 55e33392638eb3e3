"""The flow `retrain`: a challenger is trained, and takes the champion's place if it is better.

Read `retrain_model` for the story of a run. Each of its stages notes what it has come to, so that
a run that was killed goes on behind them; see `trial_core.models.journal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any, get_type_hints

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed

from trial_core import text_format
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, RankFailed, Stalled, TrialError
from trial_core.models.journal import (
    REPORT,
    Challenger,
    Champion,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.records import Version
from trial_core.retention.claims import running
from trial_core.run.run_dirs import home_folder
from trial_core.run.searcher_metric import searcher_metric
from trial_core.run.stop_request import StopHandler
from trialflow.flows.evaluate import EvaluateResult, evaluate_checkpoint
from trialflow.flows.lifecycle.crash_limit import refuse_if_crashed_too_often
from trialflow.flows.lifecycle.gpu_slots import gpu_slots
from trialflow.flows.lifecycle.stop_watch import StopWatch
from trialflow.flows.retraining.model_lock import FLOW, Overlapping, alone
from trialflow.flows.retraining.outcome import (
    RetrainResult,
    ending_with_its_time,
    publish_if_it_holds,
    reporting,
    result_of,
    tell_of,
)
from trialflow.flows.train import refuse_missing_code, train_trial
from trialflow.tasks.report.retraining_report import RetrainingFacts, report_of
from trialflow.tasks.retrain import (
    RetrainingRun,
    carry_out,
    compare,
    make_plan,
    register_challenger,
    renew_plan,
)

SKIPPED = "Skipped"


@flow(name=FLOW, flow_run_name="retrain {config.name}", validate_parameters=True)
def retrain(
    config: ExperimentConfig, data: dict[str, Any] | None = None
) -> RetrainResult | State[Any]:
    """Train a challenger on fresh data, and promote it if it is better than the champion on that.

    Args:
        config: the experiment. Texts in its `data` are templates: see `trial_core.models.data_templates`.
        data: goes over the experiment's `data`, as it is: what has just arrived, say.

    Raises:
        ConfigError: a template cannot be rendered, `data` is no plain data, or a callback is not
            there.
        CheckpointDamaged, CheckpointNotFound: the champion's checkpoint cannot be validated.
        CallbackFailed: all is done, but for a callback.
        RankFailed, Stalled, TrialError: as `train`.
    """
    refuse_if_crashed_too_often(config.max_restarts)
    refuse_missing_code(config)
    retraining = RetrainingRun(config, str(runtime.flow_run.id))
    plan = retraining.plan_before()
    scheduled_time: datetime = runtime.flow_run.scheduled_start_time
    if plan is None and (lateness := too_late(retraining, scheduled_time)):
        return Completed(name=SKIPPED, message=lateness)
    with ExitStack() as held:
        try:
            held.enter_context(alone(retraining.model, waits=plan is not None))
        except Overlapping as overlap:
            return Completed(name=SKIPPED, message=f"skipped: {overlap}")
        if plan is None:
            the_plan = make_plan(retraining, scheduled_time, data)
        else:
            the_plan = renew_plan(retraining, plan)
        devices = held.enter_context(gpu_slots(config))
        stopping = held.enter_context(StopHandler(config.stopping.grace_seconds))
        budget_seconds = config.stopping.time_budget_seconds
        watch = held.enter_context(StopWatch(stopping, budget_seconds))
        return watch.concluding(lambda: retrain_model(retraining, the_plan, stopping, devices))


# What flow.serve() pickles has no names of this module, which the annotations are read in.
retrain.fn.__annotations__ = get_type_hints(retrain.fn)


def too_late(retraining: RetrainingRun, scheduled_time: datetime) -> str | None:
    """How much too late it is to begin; None: it is not."""
    limit = retraining.settings.max_lateness_seconds
    late_seconds = (datetime.now(timezone.utc) - scheduled_time).total_seconds()
    if limit is None or late_seconds <= limit:
        return None
    return (
        f"skipped: scheduled for {scheduled_time:%Y-%m-%d %H:%M:%S %Z}, "
        f"{text_format.duration(late_seconds)} ago, and retraining.max_lateness_seconds is {limit:g}"
    )


def retrain_model(
    retraining: RetrainingRun,
    plan: RetrainingPlan,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> RetrainResult:
    """Validate the champion, train the challenger, compare them, move the alias, tell of it.

    Args:
        devices: variables for the ranks that say which accelerators are this run's.
    """
    champion = champion_of(retraining, plan)
    folder = home_folder() / plan.trial
    facts = RetrainingFacts(
        retraining.model, retraining.settings.start, retraining.rule, plan, champion,
        places={
            "the challenger's own report": f"artifact {report_of(plan.trial)}",
            "runs on this machine": str(folder),
            "this report": retraining.notes.url(REPORT),
        },
    )  # fmt: skip
    source = champion.checkpoint if champion else None
    # Under a name of its own: the challenger's trial has a claim while it trains.
    with (
        running(retraining.store, f"{plan.trial}-retraining", source) as claim,
        reporting(facts, retraining, folder),
    ):
        with ending_with_its_time(stopping):
            if champion is not None:
                facts.champion_found = retraining.notes.once(
                    plan.champion_note, Champion,
                    lambda: validate_champion(retraining, plan, champion, stopping, devices),
                )  # fmt: skip
            facts.challenger = trained_challenger(retraining, plan, champion, stopping, devices)
            if facts.challenger is not None:
                claim.needs(facts.challenger.checkpoint)
                facts.outcome = decide(retraining, facts, facts.challenger, stopping)
        if facts.outcome is None:
            facts.ended = f"stopped: {stopping.request}"
        report = publish_if_it_holds(facts, retraining, folder)
        result = result_of(facts, retraining.run_id, report, stopping)
        if facts.outcome is not None:
            tell_of(retraining, facts, result, folder, stopping)
    return result


def champion_of(retraining: RetrainingRun, plan: RetrainingPlan) -> Version | None:
    """The version that the challenger is compared with."""
    if plan.champion is None:
        return None
    return retraining.registry.version(retraining.model, plan.champion)


def validate_champion(
    retraining: RetrainingRun,
    plan: RetrainingPlan,
    champion: Version,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> Champion:
    """How the champion does on the run's data, on its slots, which may be others than it had.

    Raises:
        CheckpointDamaged, CheckpointNotFound: its checkpoint cannot be used.
    """
    try:
        config = retraining.as_the_champion(plan, champion)
        result = evaluate_with_restarts(
            config, champion.checkpoint, retraining.run_id, stopping, devices
        )
    except (CheckpointDamaged, CheckpointNotFound) as damage:
        raise type(damage)(
            f"the champion, {champion}, cannot be validated, so nothing was trained: {damage}; "
            f"`trialflow models rollback {champion.model}` makes the one before it champion again, "
            "and a retry of this run then goes on against that one"
        ) from damage
    except (RankFailed, TrialError):
        get_run_logger().error(
            "the champion, %s, cannot be validated: where that is because its code has changed, "
            "restore that, or promote another version (`trialflow models promote`)", champion,
        )  # fmt: skip
        raise
    value = searcher_metric(result.metrics, retraining.rule.metric)
    return Champion(metrics=result.metrics, value=value)


def evaluate_with_restarts(
    config: ExperimentConfig,
    checkpoint: str,
    unique: str,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> EvaluateResult:
    """As `evaluate_checkpoint`; ranks that die or hang are started again, as often as those of a
    training are. One that raises would raise again."""
    restarts = 0
    while True:
        try:
            return evaluate_checkpoint(config, checkpoint, unique, stopping, devices)
        except (RankFailed, Stalled) as failure:
            raised = isinstance(failure, RankFailed) and failure.error_type is not None
            if raised or stopping.request is not None or restarts == config.max_restarts:
                raise
            restarts += 1
            get_run_logger().warning("the champion is validated again: %s", failure)


def trained_challenger(
    retraining: RetrainingRun,
    plan: RetrainingPlan,
    champion: Version | None,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> Challenger | None:
    """The challenger, trained to its end and registered. None: it was stopped before.

    Nothing is trained against a champion that is none any more: it could not be promoted.
    """
    notes = retraining.notes
    known = notes.read("challenger", Challenger)
    if known is not None:
        return known
    if moved := moved_meanwhile(retraining, plan):
        return notes.note("challenger", Challenger(why_none=f"{moved}; so nothing was trained"))
    config = retraining.as_the_challenger(plan, champion)
    result = train_trial(config, plan.trial, stopping, devices)
    if result.stopped_early and stopping.request is not None:  # a trial may end itself, too
        return None
    return notes.note("challenger", register_challenger(retraining, plan))


def moved_meanwhile(retraining: RetrainingRun, plan: RetrainingPlan) -> str | None:
    """Who has moved the alias since the run was planned; None: it is where it was."""
    state = retraining.registry.state(retraining.model)
    if (state.champion if state else None) == plan.champion:
        return None
    return f"the champion was moved meanwhile: {state or 'there is none any more'}"


def decide(
    retraining: RetrainingRun, facts: RetrainingFacts, challenger: Challenger, stopping: StopHandler
) -> PromotionDecision | None:
    """Compare the challenger with the champion, and move the alias if it is better; what became of
    it. None: the run was stopped before anything was moved. A time budget that is over now, when
    all is trained, is no reason to leave that undecided."""
    notes = retraining.notes
    known = notes.read("outcome", PromotionDecision)
    if known is not None:
        return known
    verdict = notes.once(
        "verdict", PromotionDecision, lambda: compare(retraining, facts.champion_found, challenger)
    )
    if stopping.request is not None and stopping.request.reason != "time budget":
        return None
    return notes.note("outcome", carry_out(retraining, facts.plan, challenger, verdict))
