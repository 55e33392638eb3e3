"""The result of the flow `retrain`: its report, its event, its callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.errors import RegistryError, Stopped, StorageError, Superseded
from trial_core.models.journal import REPORT, PromotionDecision, StageRecord
from trial_core.observe.report.retraining_report import FILE, RetrainingFacts
from trial_core.schedule.stop_requests import StopHandler
from trialflow.tasks.artifact import MarkdownArtifact
from trialflow.tasks.client_retries import NO_ANSWER
from trialflow.tasks.retrain import CallbackFailed, RetrainingRun, run_callback, send_event


@dataclass(frozen=True)
class RetrainResult:
    """Result of a run of the flow.

    Attributes:
        model: name of the model.
        promoted: True if the challenger was promoted.
        why: the reason for that, for people.
        metric: the metric that was compared.
        champion: number of the champion version before the run, or None if the model had none.
        challenger: number of the trained version, or None if it has no checkpoint to compare.
        champion_value, challenger_value: the metric of both, on the same data.
        checkpoint_uuid: the challenger's checkpoint.
        trial: the challenger's trial; the search, if it has found no challenger.
        scheduled_time: scheduled start: ISO 8601, UTC.
        data: the data of the run.
        stop_reason: why the run was stopped before a decision, or None if it was not.
        report_path: the report, a Markdown file.
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

    def as_json_data(self) -> dict[str, Any]:
        """Plain data for callbacks and the event: non-finite numbers become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def describe_decision(result: RetrainResult) -> str:
    """Describe the decision of a stopped run, for people."""
    if result.stop_reason is None:
        return result.why
    return f"nothing was decided about model {result.model}; the challenger is {result.trial}"


def retrain_result(
    facts: RetrainingFacts, run_id: str, report: Path, stopping: StopHandler
) -> RetrainResult:
    """Return the result of the run so far."""
    champion, challenger, outcome = facts.champion_result, facts.challenger, facts.outcome
    return RetrainResult(
        model=facts.model,
        promoted=outcome is not None and outcome.promoted,
        why=facts.ended if outcome is None else outcome.why,
        metric=facts.rule.metric,
        champion=facts.plan.champion,
        challenger=challenger.version if challenger else None,
        champion_value=champion.value if champion else None,
        challenger_value=challenger.value if challenger else None,
        checkpoint_uuid=challenger.checkpoint if challenger else None,
        trial=(challenger.trial if challenger else "") or facts.plan.trial,
        scheduled_time=facts.plan.scheduled_at,
        data=facts.plan.data,
        stop_reason=str(stopping.final_request()) if outcome is None else None,
        report_path=str(report),
        flow_run_id=run_id,
    )


def notify(
    retraining: RetrainingRun, facts: RetrainingFacts, result: RetrainResult, stopping: StopHandler
) -> None:
    """Send the event and call the callbacks, unless an earlier attempt has.

    Raises:
        CallbackFailed: names the callbacks that failed, and why. The others were called.
        NO_ANSWER: the event could not be sent. Callbacks were called.
    """
    journal, outcome = retraining.journal, result.as_json_data()
    event_error: Exception | None = None
    if journal.read("told", StageRecord) is None:
        try:
            send_event(retraining, outcome)
        except NO_ANSWER as error:  # callbacks do not need the server
            event_error = error
        else:
            journal.mark_done("told", "the event was sent")
    failed: dict[str, str] = {}
    for number, function in enumerate(retraining.settings.callbacks):
        name = f"callback-{number:02d}"
        if journal.read(name, StageRecord) is not None:
            continue
        problem = run_callback(retraining, function, outcome, stopping)
        if problem is None:
            journal.mark_done(name, f"{function} was called")
        elif journal.read(name, StageRecord) is None:  # another attempt may have called it
            failed[function] = problem
    if failed:
        facts.failed_callbacks = failed
        problems = "; ".join(f"{function}: {problem}" for function, problem in failed.items())
        raise CallbackFailed(
            f"model {retraining.model}: {facts.headline()} ({result.why}). This is final, but "
            f"callbacks failed: {problems}. Retry the run to call them again"
        ) from event_error
    if event_error is not None:
        raise event_error


@contextmanager
def report_failure(
    facts: RetrainingFacts, retraining: RetrainingRun, stopping: StopHandler
) -> Iterator[None]:
    """If the block fails, publish a report that says why."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, CallbackFailed):
            how = (
                f"stopped: {stopping.final_request()}; "
                if isinstance(error, Stopped)
                else "failed: "
            )
            facts.ended = f"{how}{error or type(error).__name__}"
        if not isinstance(error, Superseded):  # the newer attempt writes the report
            publish_report(facts, retraining)
        raise


def publish_report(facts: RetrainingFacts, retraining: RetrainingRun) -> Path:
    """Write this attempt's report to the file, the storage and the artifact. Returns the file.

    Not if another attempt has decided the run and this one has not: the other's report is kept. A
    place that cannot be written is a warning, and neither fails the run nor skips the others.
    """
    path, journal = retraining.folder / FILE, retraining.journal
    if facts.outcome is None:
        try:
            decided = journal.read("outcome", PromotionDecision)
        except (StorageError, RegistryError):  # it is logged below
            decided = None
        if decided is not None:
            get_run_logger().warning("another attempt decided this run: its report is kept")
            return path
    text, name = facts.render(), f"retraining-{facts.model}"

    def write_artifact() -> None:
        MarkdownArtifact(name, f"Retraining of model {facts.model}").write(text)

    places: dict[str, Callable[[], None]] = {
        f"the file {path}": lambda: replace_file(path, text.encode()),
        journal.url(REPORT): lambda: journal.write_report(text),
        f"the artifact {name}": write_artifact,
    }
    for place, write in places.items():
        try:
            write()
        except (StorageError, *NO_ANSWER) as error:
            get_run_logger().warning(
                "the report was not written to %s: %s: %s", place, type(error).__name__, error
            )
    return path


@contextmanager
def ending_at_time_budget(stopping: StopHandler) -> Iterator[None]:
    """End the block without an error if the time budget stopped it."""
    try:
        yield
    except Stopped:
        if stopping.request is None or stopping.request.reason != "time budget":
            raise
