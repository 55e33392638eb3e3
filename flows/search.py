"""The flow `search`: trains many trials, the better ones further, to find good hyperparameters.

What to train next follows from the search's log alone (`trial_core/search`). This flow has it
trained: each trial, from where it is to its next rung, is a run of the flow `train` below this one,
and writes down what came of it. So any later run of the flow continues the search.
"""

import os
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, CancelledRun, Pause
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.utilities.annotations import quote

from trial_core.checkpoint.layout import checked_trial
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.code_source import refuse_missing_code
from trial_core.driver.placement import ForkServers, choose_provider
from trial_core.driver.result import TrialResult, describe_pause
from trial_core.errors import (
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    InvalidHP,
    LaunchError,
    NonFiniteLoss,
    RankFailed,
    SlotsError,
    Stopped,
    StorageError,
    Superseded,
    TrialBusy,
    TrialError,
    TrialflowError,
)
from trial_core.observe.events.observers import Observer, current_observer, observing
from trial_core.processes.machine.accelerators import count_accelerators, resolve_slot_count
from trial_core.processes.machine.run_dirs import run_dir_of, trial_id
from trial_core.schedule.stop_requests import StopHandler, StopRequest, completed_early
from trial_core.schedule.units import Batch
from trial_core.search.figures import html
from trial_core.search.log import SearchLog
from trial_core.search.page import glance, markdown
from trial_core.search.search import Leg, Sampler, Search, sampler_of
from trial_core.search.settings import SearchExperiment
from trial_core.search.view import best_checkpoint, view_of
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.parent_runs import identity_of_run, stopping_with
from trialflow.flows.lifecycle.run_log import readable_task_log
from trialflow.flows.lifecycle.run_names import search_name
from trialflow.flows.lifecycle.shared_gpus import has_gpu_limit
from trialflow.flows.lifecycle.stop_monitor import POLL_SECONDS, StopMonitor
from trialflow.flows.lifecycle.storage_of_run import StorageLabel, storage_of_run
from trialflow.flows.server.prefect_settings import prepare_temporary_server
from trialflow.flows.train import PartOfTraining, train
from trialflow.tasks.artifact import MarkdownArtifact
from trialflow.tasks.client_retries import NO_ANSWER
from trialflow.tasks.required_experiment import GIVEN, MISSING, experiment_form
from trialflow.tasks.storage_block import with_credentials

prepare_temporary_server()

FLOW = "search"
REPORT = "search.html"
MAX_SIDE_BY_SIDE = 64
CANCELLED = f"Stopped: {StopRequest('cancelled', 'in Prefect')}"
"""How `StopMonitor` begins the message of a flow run's state that a person has cancelled."""


@dataclass(frozen=True)
class SearchResult:
    """How a search, or this run of it, has ended.

    Attributes:
        search: the search's id; give it to the flow again to continue the search.
        is_over: True if nothing is left to train.
        stop_reason: why it is not over: the flow run was stopped, or trainings of trials were.
        trials: how many trials have begun.
        best_trial: the id of the trial with the best result; None without a result.
        hyperparameters: of that trial.
        metric: its best value of the searcher metric.
        checkpoint_uuid: the trial's checkpoint at that rung; if that was deleted, its best one, if
            it is as good.
        report_path: a page with figures, on this machine.
        flow_run_id: Prefect's id of the flow run.
    """

    search: str
    is_over: bool
    stop_reason: str | None = None
    trials: int = 0
    best_trial: str | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    checkpoint_uuid: str | None = None
    report_path: str | None = None
    flow_run_id: str | None = None


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@experiment_form(search="Search to continue", config="Experiment", take_over="Take over")
@flow(name=FLOW, flow_run_name=search_name, validate_parameters=True)
def search(
    config: Annotated[SearchExperiment, GIVEN] = MISSING,
    search: str | None = None,
    take_over: bool = False,
) -> SearchResult | State[Any]:
    """Search for hyperparameters. A run that is asked to stop saves its trials first.

    Args:
        config: the experiment, whose `searcher` says how to search, and whose hyperparameters have
            ranges.
        search: id of the search to continue. The default belongs to the flow run, so a retry of the
            flow run continues its search.
        take_over: True to take the search from another run that may be live, which ends that run.

    Raises:
        ConfigError: the search began with other settings, or its sampler cannot be used.
        CheckpointError: `search` is not a valid id.
        CheckpointNotFound: the storage does not know the search `search`.
        SearchError: more trials have failed than `max_failed_trials`, or the log was altered.
        TrialflowError: another run that may be live has the search.
    """
    identity, is_new = identity_of_run(config), search is None
    search = checked_trial(search or trial_id(f"{config.name} search", identity))
    refuse_missing_code(config)
    sampler = sampler_of(config)  # before anything is stored
    place = with_credentials(config).checkpoint_storage
    store = CheckpointStore(place.url, place.options)
    check_crash_limit(config.max_restarts)
    with (
        readable_task_log(),
        StopHandler(config.stopping.grace_seconds) as stopping,
        StopMonitor(stopping, config.stopping) as watch,
    ):
        return watch.run(
            lambda: SearchRun(config, search, identity, store, stopping, sampler).run(
                is_new, take_over
            ),
            describe_outcome,
        )


def describe_outcome(result: SearchResult) -> str:
    """Describe what a stopped search has, for people."""
    return f"search {result.search} has begun {result.trials} trials, and continues with --resume"


@dataclass(frozen=True)
class LegOutcome:
    """What came of a trial's training to a rung: its result, a failure, or a stop.

    Attributes:
        is_counted: False if its failure is that of this trial alone: see `Exited`.
        stopped: why it was stopped or has not begun, for people.
        is_cancelled: True if a person has cancelled its flow run.
    """

    result: TrialResult | None = None
    failure: BaseException | None = None
    is_counted: bool = True
    stopped: str = ""
    is_cancelled: bool = False


@task(name="train-trial", task_run_name="{name}", cache_policy=NO_CACHE)
def train_trial_to_rung(
    name: str,
    leg: Leg,
    attempt: str,
    observer: Observer,
    fork_servers: ForkServers,
    stopping: StopHandler,
) -> LegOutcome:
    """Train a trial to its rung, as a flow run below the search's.

    Args:
        attempt: identifies the search, which owns the trial.
        observer: gets the events of the trial's run.
        fork_servers: they start the ranks, on this machine.
        stopping: the search's, with which the training stops.
    """
    part = PartOfTraining(attempt, None if leg.is_last else leg.until)
    try:
        with observing(observer), stopping_with(stopping), fork_servers.one(leg.config):
            state: State[Any] = train(leg.config, trial=leg.trial.id, part=part, return_state=True)
    except (Abort, CancelledRun, Pause) as stop:
        return LegOutcome(stopped=str(stop))
    if state.is_failed() or state.is_crashed():
        failure = state.result(raise_on_failure=False)
        if isinstance(failure, (Stopped, CommitConflict, TrialBusy)):
            return LegOutcome(stopped=str(failure))
        return LegOutcome(failure=failure, is_counted=not isinstance(failure, NonFiniteLoss))
    if not state.is_completed():
        message = state.message or state.name or ""
        return LegOutcome(stopped=message, is_cancelled=message.startswith(CANCELLED))
    result: TrialResult = state.result()
    if result.stop_reason not in (None, describe_pause(part.until)):  # by its time budget
        return LegOutcome(stopped=str(result.stop_reason))
    is_asked = result.stopped_early and result.stop_reason is None
    at_rung = int(leg.until.value) if isinstance(leg.until, Batch) else result.batches_trained  # type: ignore[arg-type]
    validated_at = result.validated_at
    if not is_asked and validated_at is not None and validated_at >= at_rung:
        return LegOutcome(result)
    how = completed_early(result.trial_stop_reason) if is_asked else "ended by itself"
    at = "no validation" if validated_at is None else f"validated at {validated_at}"
    return LegOutcome(
        failure=TrialError(
            f"it has {how}, after {result.batches_trained} batches ({at}), before its "
            f"validation at {leg.until.value} {leg.until.unit}"
        ),
        is_counted=not is_asked,
    )


@dataclass
class SearchRun:
    """One run of the flow: it has trained what is due, side by side, until nothing is.

    Attributes:
        owner: identifies the owner of the search.
        began: since when the time budget counts, by the monotonic clock.
    """

    experiment: SearchExperiment
    search_id: str
    owner: str
    store: CheckpointStore
    stopping: StopHandler
    sampler: Sampler | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._observer = current_observer()
        self._logger = get_run_logger()
        self._page = page_of(self.search_id)
        self._running: dict[int, Leg] = {}
        self._left: dict[int, str] = {}  # trials that this run does not train further, and why
        self._ended: queue.SimpleQueue[tuple[Leg, PrefectFuture[LegOutcome]] | None] = (
            queue.SimpleQueue()
        )
        self._fork_servers = ForkServers()
        self._failure: TrialflowError | None = None

    def run(self, is_new: bool, take_over: bool) -> SearchResult:
        """Own the search, and continue it. Raises as the flow."""
        if not is_new and not SearchLog(self.store.storage, self.search_id).events:
            raise CheckpointNotFound(  # else a search would begin under the id of a trial
                f"search {self.search_id} is not continued: {self.store.url} has no search with "
                "this id, which may be that of a trial; `trialflow search list` shows the searches"
            )
        mark = storage_of_run(self.experiment.stopping.server_outage_seconds, self.stopping)
        with own_trial(
            self.store, self.search_id, self.owner, is_new=is_new, take_over=take_over, mark=mark
        ) as (_, fence):
            if not self.store.is_process_local:
                label = StorageLabel()
                label.note(fence.record.storage)
                label.send()
            log = SearchLog(self.store.storage, self.search_id)
            search = Search(self.experiment, log, self.search_id, self.sampler)
            wake = partial(self._ended.put, None)
            with self._fork_servers, self.stopping.subscribed(wake, wake):
                self._train_what_is_due(search)
            report = run_dir_of(self.search_id) / REPORT
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(html(view_of(search, self.store.url)), encoding="utf-8")
        if self._failure is not None:
            raise self._failure
        return self._result(search, report)

    def _train_what_is_due(self, search: Search) -> None:
        limit = side_by_side(self.experiment)
        due = sum(plan.concurrent for plan in search.state.plans)
        if limit == MAX_SIDE_BY_SIDE < due:
            self._tell(f"{due} trials may be due at a time; at most {limit} train side by side")
        while True:
            self._start_what_is_due(search, limit)
            self._show(search)
            if not self._running:
                return
            if (ended := self._ended.get()) is not None:
                leg, future = ended
                del self._running[leg.trial.number]
                with self._ending_after_a_failure():
                    self._note(search, leg, outcome_of(future))

    @contextmanager
    def _ending_after_a_failure(self) -> Iterator[None]:
        """After an error of the search, what still runs is trained to its rung; nothing begins."""
        try:
            yield
        except TrialflowError as failure:
            self._failure = self._failure or failure

    def _start_what_is_due(self, search: Search, limit: int) -> None:
        while len(self._running) < limit and not self._ends:
            leg = None
            with self._ending_after_a_failure():
                leg = search.next({*self._running, *self._left})
            if leg is None:
                return
            self._warn_of_lost_batches(leg)
            leg = self._within_time_budget(leg)
            self._running[leg.trial.number] = leg
            name = f"{leg.trial.id} to {leg.until.value}"
            observer = self._observer.of_trial(leg.trial.number, leg.trial.id)
            owner = f"{self.search_id}/{leg.trial.number}"
            objects = [leg, owner, observer, self._fork_servers, self.stopping]
            given: list[Any] = [name, *map(quote, objects)]  # quote: not looked into
            future = train_trial_to_rung.submit(*given)
            future.add_done_callback(partial(self._note_end, leg))

    def _warn_of_lost_batches(self, leg: Leg) -> None:
        """Tell if a trial cannot continue from its rung, as its checkpoints were deleted."""
        if not leg.trial.reached:
            return
        try:
            newest = self.store.newest(leg.trial.id)
        except CheckpointError:
            return  # its training reads them again, and has the error
        at = 0 if newest is None else newest.progress.batches_trained
        if at < leg.trial.batches and (newest is None or leg.trial.reached[-1].checkpoint):
            self._tell(
                f"trial {leg.trial.number} ({leg.trial.id}) is trained again from batch {at}: it "
                f"had reached batch {leg.trial.batches}, and {self.store.url} has no checkpoint of "
                f"it after batch {at}"
            )

    def _tell(self, text: str) -> None:
        self._logger.warning("%s", text)
        self._observer.notice(text)

    def _note_end(self, leg: Leg, future: PrefectFuture[LegOutcome]) -> None:
        self._ended.put((leg, future))

    def _within_time_budget(self, leg: Leg) -> Leg:
        """The leg, whose run has only what is left of the search's time budget."""
        stopping = self.experiment.stopping
        if stopping.time_budget_seconds is None:
            return leg
        left = stopping.time_budget_seconds - (time.monotonic() - self.began)
        rest = stopping.model_copy(update={"time_budget_seconds": max(left, 0.001)})
        return replace(leg, config=leg.config.model_copy(update={"stopping": rest}))

    @property
    def _ends(self) -> bool:
        """True if no training is begun any more."""
        return self._failure is not None or self.stopping.request is not None

    def _note(self, search: Search, leg: Leg, outcome: LegOutcome) -> None:
        """Write down what came of a training. Of one that was stopped nothing: it continues.

        Raises:
            TrialflowError: the search cannot continue.
        """
        result, failure = outcome.result, outcome.failure
        if isinstance(self._failure, Superseded):
            return
        if result is not None:
            is_validated = result.checkpoint_at == result.validated_at
            checkpoint = result.checkpoint_uuid if is_validated else None
            search.reached(leg, result.batches_trained, result.validation_metrics, checkpoint)
        elif self._ends:  # which may be the cause
            return
        elif failure is not None:
            if not is_of_trial(failure):
                raise of_search(failure, leg)
            kind = failure.error_type if isinstance(failure, RankFailed) else None
            search.failed(leg, str(failure), kind == InvalidHP.__name__, outcome.is_counted)
        elif self.stopping.wait(2 * POLL_SECONDS):  # the trial may learn of the stop first
            return
        elif outcome.is_cancelled:
            search.failed(leg, "its flow run was cancelled")
        else:
            number = leg.trial.number
            self._left[number] = f"trial {number} was not trained further: {outcome.stopped}"
        news = self._left.get(leg.trial.number) or search.news(leg.trial)
        self._logger.info("%s", news)
        self._observer.search_advanced(news)

    def _show(self, search: Search) -> None:
        """Show the search, also on its page. A server that does not take it gets the next one."""
        status, view = "running" if self._running else "", view_of(search, self.store.url)
        self._observer.search_shown(*glance(view), search.state.progress)
        with suppress(*NO_ANSWER):
            self._page.write(markdown(view, status))

    def _result(self, search: Search, report: Path) -> SearchResult:
        state, request = search.state, self.stopping.final_request()
        why = "; ".join(self._left.values()) if request is None else str(request)
        trial, best = state.best or (None, None)
        checkpoint = best.checkpoint if best else None
        with suppress(CheckpointError):  # the search has ended all the same
            kept = best_checkpoint(self.store, view_of(search))
            checkpoint = None if kept is None else kept.uuid
        return SearchResult(
            search=self.search_id,
            is_over=state.is_over,
            stop_reason=None if state.is_over else why,
            trials=len(state.trials),
            best_trial=trial.id if trial else None,
            hyperparameters=dict(trial.hyperparameters) if trial else {},
            metric=best.metric if best else None,
            checkpoint_uuid=checkpoint,
            report_path=str(report),
            flow_run_id=str(runtime.flow_run.id),
        )


def page_of(search: str) -> MarkdownArtifact:
    """The search's page in Prefect."""
    return MarkdownArtifact(f"search-{search}", f"Search {search}")


def outcome_of(future: PrefectFuture[LegOutcome]) -> LegOutcome:
    """The outcome of a training that has ended. Without a server, none can begin or end."""
    try:
        return future.result()
    except NO_ANSWER as error:
        return LegOutcome(failure=error)


def is_of_trial(failure: BaseException) -> bool:
    """Return whether a training failed by its trial. Else others would, too."""
    is_of_ranks = isinstance(failure, (SlotsError, TrialError, CheckpointError))
    return is_of_ranks and not isinstance(failure, (LaunchError, CheckpointNotFound, StorageError))


def of_search(failure: BaseException, leg: Leg) -> TrialflowError:
    """The error that a search ends with, if a training failed by something else than its trial."""
    if isinstance(failure, TrialflowError):
        return failure
    error = TrialflowError(
        f"trial {leg.trial.number} ({leg.trial.id}) cannot be trained: "
        f"{type(failure).__name__}: {failure}. If the Prefect server is away, continue the search "
        "when it answers"
    )
    error.__cause__ = failure
    return error


def side_by_side(experiment: SearchExperiment) -> int:
    """How many trials are trained at the same time: as many as have slots on this machine.

    With another provider of machines, as many as the experiment allows. On GPUs of this machine
    one, unless the Prefect server counts them: else trials would share a GPU.
    """
    settings, resources = experiment.searcher, experiment.resources
    most = settings.max_concurrent_trials or settings.max_trials or MAX_SIDE_BY_SIDE
    most = min(most, MAX_SIDE_BY_SIDE)
    if choose_provider(experiment) is not None:
        return most
    variables = {**os.environ, **experiment.rank_variables}
    slots = resolve_slot_count(resources.min_slots, variables, resources.max_slots)
    available = count_accelerators(variables)
    if available and not has_gpu_limit(slots):
        return 1
    return max(1, min(most, (available or len(os.sched_getaffinity(0))) // slots))
