"""The stages of the flow `retrain` that are not those of `train` and `evaluate`: plan, register,
compare, move, tell and callbacks.

Each is gone through once a flow run, however often that is killed: see `trial_core.models.journal`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, RelatedResource, Resource
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    PromotionConflict,
    PromotionRefused,
    TrialflowError,
)
from trial_core.models import callback_process
from trial_core.models.comparison import PromotionRule
from trial_core.models.data_templates import checked, merged, rendered
from trial_core.models.journal import (
    Challenger,
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.records import Version
from trial_core.models.registry import Registry
from trial_core.retention.policy import own_metric
from trial_core.run.run_dirs import home_folder, trial_id
from trial_core.run.stop_request import StopHandler
from trialflow.tasks.retrying import STORAGE_RETRIES, STORAGE_RETRY_SECONDS, storage_failed

LOGS = "logs"
PROMOTED, KEPT = "trialflow.model.promoted", "trialflow.model.kept"


class CallbackFailed(TrialflowError):
    """A callback of a retraining failed, after all else was done."""


class RetrainingRun:
    """What the stages of one retraining share.

    Attributes:
        config: the experiment, with data as its file has it.
        model: which model is retrained.
        settings: how.
        rule: what is better.
        store: where checkpoints and the registry are.
        registry: the models.
        run_id: the flow run's id; the same over all attempts.
        notes: what this attempt, or one before it, has come to.
    """

    def __init__(self, config: ExperimentConfig, run_id: str) -> None:
        place, searcher = config.checkpoint_storage, config.searcher
        self.config = config
        self.settings = config.effective_retraining()
        self.model = self.settings.model
        self.rule = PromotionRule(searcher.metric, searcher.smaller_is_better, self.settings.margin)
        self.store = CheckpointStore(place.url, place.options)
        self.registry = Registry(self.store)
        self.run_id = run_id
        self.notes = Journal(self.store, self.model, run_id)

    def plan_before(self) -> RetrainingPlan | None:
        """The plan of an earlier attempt at this run, if one has come so far."""
        return self.notes.plan()

    def with_data(self, plan: RetrainingPlan) -> ExperimentConfig:
        """The experiment with the data of this run."""
        return self.config.model_copy(update={"data": plan.data})

    def as_the_champion(self, plan: RetrainingPlan, champion: Version) -> ExperimentConfig:
        """The experiment as the champion was trained, with the data of this run."""
        manifest = self.store.open(champion.checkpoint)
        own = {"entrypoint": manifest.entrypoint, "hyperparameters": manifest.hyperparameters}
        return self.with_data(plan).model_copy(update=own)

    def as_the_challenger(self, plan: RetrainingPlan, champion: Version | None) -> ExperimentConfig:
        """The experiment as the challenger is trained, with the data of this run."""
        config = self.with_data(plan)
        if champion is None or self.settings.start == "scratch":
            return config
        source = {
            "source_checkpoint_uuid": champion.checkpoint,
            "source_weights_only": self.settings.start == "warm",
        }
        searcher = config.searcher.model_copy(update=source)
        return config.model_copy(update={"searcher": searcher})


_ABOUT_THE_STORAGE: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": STORAGE_RETRIES,
    "retry_delay_seconds": STORAGE_RETRY_SECONDS,
    "retry_condition_fn": storage_failed,
}


@task(name="plan", task_run_name="plan", **_ABOUT_THE_STORAGE)
def make_plan(
    retraining: RetrainingRun, scheduled_time: datetime, data: Mapping[str, Any] | None
) -> RetrainingPlan:
    """Decide what the run does, once for all its attempts.

    Args:
        scheduled_time: when the run was to begin.
        data: goes over the experiment's; taken as it is, without templates.

    Raises:
        ConfigError: templates among the experiment's data cannot be rendered; `data` holds what
            JSON cannot carry; or a callback is not there.
    """
    _find_callbacks(retraining)
    scheduled_time = scheduled_time.astimezone(timezone.utc)
    state = retraining.registry.state(retraining.model)
    plan = RetrainingPlan(
        trial=trial_id(retraining.config.name, retraining.run_id),
        scheduled_at=scheduled_time.isoformat(),
        begun_at=utc_now(),
        data=merged(rendered(retraining.config.data, scheduled_time), checked(data or {})),
        champion=state.champion if state else None,
        move=state.number if state else 0,
    )
    plan = retraining.notes.note("plan", plan)
    against = "no champion" if plan.champion is None else f"version {plan.champion}"
    get_run_logger().info("trial %s against %s, with data %s", plan.trial, against, plan.data)
    return plan


@task(name="plan", task_run_name="plan", **_ABOUT_THE_STORAGE)
def renew_plan(retraining: RetrainingRun, plan: RetrainingPlan) -> RetrainingPlan:
    """The plan of an earlier attempt, against whoever is champion now if its own was not validated:
    one that cannot be, because it is damaged, would else keep the run from ever going on."""
    notes, state = retraining.notes, retraining.registry.state(retraining.model)
    if plan.champion is None or state is None or state.champion == plan.champion:
        return plan
    is_used = (
        notes.read(plan.champion_note, Champion) is not None
        or notes.read("challenger", Challenger) is not None
    )
    if is_used:
        return plan
    note = f"planned against version {plan.champion}, which was not validated before {state}"
    get_run_logger().warning("%s", note)
    return notes.renew(
        msgspec.structs.replace(
            plan, champion=state.champion, move=state.number, renewed=plan.renewed + 1, note=note
        )
    )


def _find_callbacks(retraining: RetrainingRun) -> None:
    """Refuse callbacks that are not there: else that would be known once all is trained."""
    config = retraining.config
    for number, function in enumerate(retraining.settings.callbacks):
        problem = callback_process.call(
            function, None, code=config.code,
            log=_log_of(function, home_folder() / trial_id(config.name, retraining.run_id) / LOGS),
            environment=config.environment.environment_variables,
            timeout_seconds=retraining.settings.callback_timeout_seconds,
        )  # fmt: skip
        if problem:
            raise ConfigError(f"retraining.callbacks[{number}]: no {function} to call: {problem}")


@task(name="register", task_run_name="register", **_ABOUT_THE_STORAGE)
def register_challenger(retraining: RetrainingRun, plan: RetrainingPlan) -> Challenger:
    """Make the best checkpoint of the challenger's trial a version of the model."""
    rule, manifests = retraining.rule, retraining.store.candidates(plan.trial)
    best = rule.best(manifests)
    if best is None:
        return Challenger(why_none=rule.why_none(manifests))
    value = own_metric(best, rule.metric)
    is_finite = value is not None and math.isfinite(value)
    version = retraining.registry.register(
        retraining.model, best, metric=rule.metric, smaller_is_better=rule.smaller_is_better,
        value=value if is_finite else None, run=retraining.run_id,
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
    """Whether the challenger is better than the champion, on the same data."""
    if challenger.value is None:
        return PromotionDecision(promoted=False, why=challenger.why_none)
    verdict = retraining.rule.compare(champion.value if champion else None, challenger.value)
    return PromotionDecision(promoted=verdict.is_better, why=verdict.why)


@task(name="move", task_run_name="move", **_ABOUT_THE_STORAGE)
def carry_out(
    retraining: RetrainingRun,
    plan: RetrainingPlan,
    challenger: Challenger,
    verdict: PromotionDecision,
) -> PromotionDecision:
    """Make the challenger the champion if it is better; what became of that.

    An attempt that was killed after it had moved the alias finds its move, and makes no other.
    """
    if not verdict.promoted or challenger.version is None:
        return verdict
    if _has_moved(retraining, plan):
        return verdict
    try:
        retraining.registry.promote(
            retraining.model, challenger.version, run=retraining.run_id, why=verdict.why,
            instead_of=plan.champion,
        )  # fmt: skip
    except PromotionConflict as conflict:
        if _has_moved(retraining, plan):  # an attempt that was taken for dead
            return verdict
        why = f"the champion was moved meanwhile: {conflict}"
    except (CheckpointDamaged, CheckpointNotFound, PromotionRefused) as damage:
        why = f"the challenger's checkpoint cannot be used: {damage}"
    else:
        return verdict
    get_run_logger().warning("version %d is not promoted: %s", challenger.version, why)
    return PromotionDecision(promoted=False, why=f"{why} (it was {verdict.why})")


def _has_moved(retraining: RetrainingRun, plan: RetrainingPlan) -> bool:
    """Whether an attempt at this very run has moved the alias."""
    moves = retraining.registry.moves(retraining.model, plan.move)
    return any(move.run == retraining.run_id for move in moves)


@task(
    name="tell", task_run_name="tell", cache_policy=NO_CACHE,
    retries=STORAGE_RETRIES, retry_delay_seconds=STORAGE_RETRY_SECONDS,
)  # fmt: skip
def tell(retraining: RetrainingRun, outcome: Mapping[str, Any]) -> None:
    """Send the event. Sent twice, by an attempt that was killed and the next, it has one id, by
    which Prefect knows it.

    Raises:
        httpx.HTTPError: the server has not taken it.
    """
    name = PROMOTED if outcome["promoted"] else KEPT
    event = Event(
        id=uuid5(NAMESPACE_URL, f"{name}/{retraining.run_id}"),
        event=name,
        resource=Resource(
            {
                "prefect.resource.id": f"trialflow.model.{retraining.model}",
                "prefect.resource.name": retraining.model,
            }
        ),
        related=[
            RelatedResource(
                {
                    "prefect.resource.id": f"prefect.flow-run.{retraining.run_id}",
                    "prefect.resource.role": "flow-run",
                }
            )
        ],
        payload=dict(outcome),
    )
    # Not Prefect's emit_event, which does not say whether the server has taken it.
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/events", json=[event.model_dump(mode="json")])
        answer.raise_for_status()
    get_run_logger().info("event %s", name)


@task(name="callback", task_run_name="callback {function}", cache_policy=NO_CACHE)
def call_back(
    retraining: RetrainingRun,
    function: str,
    outcome: Mapping[str, Any],
    logs: Path,
    stopping: StopHandler,
) -> str | None:
    """Call one of the experiment's callbacks; what went wrong, None if nothing did."""
    log = _log_of(function, logs)
    problem = callback_process.call(
        function, outcome,
        code=retraining.config.code, log=log,
        environment=retraining.config.environment.environment_variables,
        timeout_seconds=retraining.settings.callback_timeout_seconds,
        is_unwanted=out_of_time(stopping, retraining.config.stopping.grace_seconds),
    )  # fmt: skip
    logger = get_run_logger()
    for line in log.read_text(errors="replace").splitlines():
        logger.info("[%s] %s", function, line)
    if problem:
        logger.error("callback %s failed: %s", function, problem)
    return problem


def out_of_time(stopping: StopHandler, grace_seconds: float) -> Callable[[], bool]:
    """Whether what takes as long as others like is to be ended as it is: the run has been asked to
    stop, also where nobody presses for that, and the grace since is over."""
    noticed: list[float] = []

    def is_over() -> bool:
        if stopping.request is not None and not noticed:
            noticed.append(time.monotonic())
        is_late = bool(noticed) and time.monotonic() - noticed[0] >= grace_seconds
        return is_late or stopping.has_expired

    return is_over


def _log_of(function: str, logs: Path) -> Path:
    return logs / f"callback-{function.replace(':', '-')}.log"
