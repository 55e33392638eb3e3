"""What a run of the flow `retrain` comes to, and who is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from trial_core.errors import RegistryError, Stopped, StorageError, Superseded
from trial_core.models.journal import PromotionDecision, StageRecord
from trial_core.run.stop_request import StopHandler
from trialflow.tasks.report.retraining_report import FILE, RetrainingFacts, publish
from trialflow.tasks.retrain import LOGS, CallbackFailed, RetrainingRun, call_back, tell


@dataclass(frozen=True)
class RetrainResult:
    """What a run of the flow came to.

    Attributes:
        model: which model was retrained.
        promoted: whether the challenger is champion now.
        why: in words.
        metric: by which both were compared.
        champion: number of the version that the challenger was compared with; None: there was none.
        challenger: number of the version that was trained; None: nothing that can be compared.
        champion_value, challenger_value: of the metric, on the same data.
        checkpoint_uuid: the challenger's.
        trial: the challenger's.
        scheduled_time: when the run was to begin: ISO 8601, UTC.
        data: what both were validated on, and the challenger trained.
        stop_reason: why nothing was decided, if somebody has stopped the run.
        report_path: the report, as a Markdown file.
        flow_run_id: Prefect's id of this run.
    """

    model: str
    promoted: bool
    why: str
    metric: str
    champion: int | None
    challenger: int | None
    champion_value: float | None
    challenger_value: float | None
    checkpoint_uuid: str | None
    trial: str
    scheduled_time: str
    data: dict[str, Any]
    stop_reason: str | None = None
    report_path: str | None = None
    flow_run_id: str | None = None

    def as_outcome(self) -> dict[str, Any]:
        """What callbacks and the event are told: plain data, as JSON can carry it."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def result_of(
    facts: RetrainingFacts, run_id: str, report: Path, stopping: StopHandler
) -> RetrainResult:
    """What the run has come to, as far as it has come."""
    found, challenger, outcome = facts.champion_found, facts.challenger, facts.outcome
    return RetrainResult(
        model=facts.model,
        promoted=outcome is not None and outcome.promoted,
        why=facts.ended if outcome is None else outcome.why,
        metric=facts.rule.metric,
        champion=facts.plan.champion,
        challenger=challenger.version if challenger else None,
        champion_value=found.value if found else None,
        challenger_value=challenger.value if challenger else None,
        checkpoint_uuid=challenger.checkpoint if challenger else None,
        trial=facts.plan.trial,
        scheduled_time=facts.plan.scheduled_at,
        data=facts.plan.data,
        stop_reason=str(stopping.request) if outcome is None else None,
        report_path=str(report),
        flow_run_id=run_id,
    )


def tell_of(
    retraining: RetrainingRun,
    facts: RetrainingFacts,
    result: RetrainResult,
    folder: Path,
    stopping: StopHandler,
) -> None:
    """Send the event and call the experiment's callbacks, as far as an earlier attempt has not.

    Raises:
        CallbackFailed: some failed: which, and why. The others were called.
        httpx.HTTPError, PrefectException: the event could not be sent; callbacks were called.
    """
    notes, outcome = retraining.notes, result.as_outcome()
    unsent: Exception | None = None
    if notes.read("told", StageRecord) is None:
        try:
            tell(retraining, outcome)
        except (httpx.HTTPError, PrefectException) as error:  # callbacks do not need the server
            unsent = error
        else:
            notes.done("told", "the event was sent")
    failed: dict[str, str] = {}
    for number, function in enumerate(retraining.settings.callbacks):
        name = f"callback-{number:02d}"
        if notes.read(name, StageRecord) is not None:
            continue
        problem = call_back(retraining, function, outcome, folder / LOGS, stopping)
        if problem is None:
            notes.done(name, f"{function} was called")
        elif notes.read(name, StageRecord) is None:  # nor has another attempt called it meanwhile
            failed[function] = problem
    if failed:
        facts.failed_callbacks = failed
        shown = "; ".join(f"{function}: {problem}" for function, problem in failed.items())
        raise CallbackFailed(
            f"model {retraining.model}: {facts.headline()} ({result.why}), and that stands; but of "
            f"its callbacks failed {shown}. A retry of the run calls those again"
        ) from unsent
    if unsent is not None:
        raise unsent


@contextmanager
def reporting(facts: RetrainingFacts, retraining: RetrainingRun, folder: Path) -> Iterator[None]:
    """Have the report say why the block has failed, if it has."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, CallbackFailed):
            how = "stopped" if isinstance(error, Stopped) else "failed"
            facts.ended = f"{how}: {error or type(error).__name__}"
        if not isinstance(error, Superseded):  # its report is that of whoever has taken over
            publish_if_it_holds(facts, retraining, folder)
        raise


def publish_if_it_holds(facts: RetrainingFacts, retraining: RetrainingRun, folder: Path) -> Path:
    """As `publish`; not where another attempt at the run has come to an outcome of which this one,
    that was taken for dead, knows nothing."""
    if facts.outcome is None:
        try:
            known = retraining.notes.read("outcome", PromotionDecision)
        except (StorageError, RegistryError):  # `publish` warns of it
            known = None
        if known is not None:
            get_run_logger().warning("another attempt has decided: the report stays as it is")
            return folder / FILE
    return publish(facts, retraining.notes, folder)


@contextmanager
def ending_with_its_time(stopping: StopHandler) -> Iterator[None]:
    """Leave the block if the time budget is over before there is anything to save: a run ends alike
    in whichever of its stages that is."""
    try:
        yield
    except Stopped:
        if stopping.request is None or stopping.request.reason != "time budget":
            raise
