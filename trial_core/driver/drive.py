"""The story of a run: its ranks are placed and launched, and train until the run ends.

`drive_trial` opens the storage, the report and the trackers. `Driver` takes the run from state to
state (`states.py`). The failure policy decides whether failed ranks are launched again, and the
placement where. While ranks live, `Driver.train_once` runs the loop, or serves a script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.retention.known_storages import note_storage
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import TrialCode, code_of_folder
from trial_core.common.any_logger import AnyLogger
from trial_core.config import ExperimentConfig
from trial_core.driver.code_source import stored_trial_code
from trial_core.driver.failure_policy import FailurePolicy
from trial_core.driver.follow_script import follow_script
from trial_core.driver.launch_ranks import launch_slots, stopping_ranks
from trial_core.driver.loop import Loop
from trial_core.driver.placement import Placement, announcer, place_ranks
from trial_core.driver.result import TrialResult, status_of
from trial_core.driver.run import HOW_TO_GO_ON, Launch, Run
from trial_core.driver.stages import PLAIN_STAGES, Stages
from trial_core.driver.stages.checkpoint import sweep_leftovers
from trial_core.driver.states import (
    Aborted,
    Completed,
    Ended,
    Launching,
    Moving,
    RanksFailed,
    Restarting,
    RunState,
    describe,
)
from trial_core.driver.uploads import Uploads
from trial_core.errors import (
    CheckpointError,
    LaunchError,
    RankFailed,
    Stalled,
    Stopped,
    Superseded,
    TopologyMismatch,
    TrialError,
)
from trial_core.observe.events.observers import Observer, Observers
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.ledger.stored_ledger import KeptLedger
from trial_core.observe.report.kubeflow_status import kubeflow_status
from trial_core.observe.report.live_report import Report
from trial_core.observe.report.run_updates import Place, RunUpdates, progress_file
from trial_core.observe.telemetry.run_telemetry import run_telemetry
from trial_core.observe.trackers.tracking import Tracking, check_trackers
from trial_core.processes.machine.run_dirs import clear_kept, clear_rank_files, locked_run_dir
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler, how_it_ended

Resume = Callable[[CheckpointStore, Fence | None], list[ResumePoint]]
"""Returns the possible resume points of a run, best first; at least one."""

STORY = 12
"""The error of a failed run lists so many of its last states."""

Follow = Callable[[Launch, Stages, Uploads], TrialResult]
"""Trains on the ranks of a launch, until the run ends, is stopped or moves."""


@dataclass(frozen=True)
class Script:
    """The parts of a run that a script gives, whose ranks another program has started.

    Attributes:
        placement: waits for the ranks to join.
        follow: trains with them.
        has_metric, how_to_go_on: see `Run`.
        resume_points: chooses the resume points; None for the default, see `Run`.
        has_code: True if its folder holds code that checkpoints should name.
    """

    placement: Placement
    follow: Follow
    has_metric: bool = True
    how_to_go_on: str = HOW_TO_GO_ON
    resume_points: Resume | None = None
    has_code: bool = True


@dataclass(frozen=True)
class Caller:
    """The parts of a run that the flow or script gives which starts it.

    Attributes:
        attempt: identifies the start of the run; the same value again continues that attempt.
        stopping: its stop requests.
        find_logger: see `Run`.
        stages: the functions or Prefect tasks that execute the stages.
        observer: gets the run's events.
        publish: shows the text of the report; None if the report is only a file.
        publish_errors: the errors that `publish` may raise, besides trialflow's own.
        devices: environment variables that give the ranks this run's accelerators.
        is_new: True if the trial is new, see `own_trial`.
        storage: the mark of the storage, if the run has begun before.
        begun: called with that mark once the run has its trial; not for ``memory://``.
        take_over: True to take the trial from another run that may be live.
        takeover_wait_seconds: how long to wait for the trial's folder, which a run that is about to
            end may hold.
        waited_seconds: how long the run has waited for its devices.
        script: the script whose ranks join; None if the run launches its ranks.
        micro_batch_samples: see `BuildTrial`.
    """

    attempt: str
    stopping: StopHandler
    find_logger: Callable[[], AnyLogger]
    stages: Stages = PLAIN_STAGES
    observer: Observer = field(default_factory=Observer)
    publish: Callable[[str], None] | None = None
    publish_errors: tuple[type[Exception], ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)
    is_new: bool | None = None
    storage: str | None = None
    begun: Callable[[str], None] = lambda mark: None
    take_over: bool = False
    takeover_wait_seconds: float = 0.0
    waited_seconds: float = 0.0
    script: Script | None = None
    micro_batch_samples: int | None = None


def drive_trial(config: ExperimentConfig, trial: str, caller: Caller) -> TrialResult:
    """Train a trial until it ends or is asked to stop; restart failed ranks.

    Raises:
        ConfigError: a tracker is not installed, or does not have one of its options.
        TrialflowError: another run that may be live has the trial; or its id is taken.
        CheckpointNotFound, StorageError: the trial is not in this storage.
        RankFailed, Stalled: the ranks failed, and no restart is left or would help.
        Stopped: the run was asked to stop before it could save.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    check_trackers(config)
    store.check_writable()
    clock, logger = RunClock(caller.waited_seconds), caller.find_logger()
    ending = Ending(caller.stopping)
    with (
        # Ends last: a slow backend must delay neither the ledger nor the release of the trial.
        run_telemetry(config, trial, clock, caller.stopping, ending, logger) as telemetry,
        locked_run_dir(trial, caller.takeover_wait_seconds) as run_dir,
        # Once, not per restart: a restart must not take the trial back from a newer run.
        own_trial(
            store, trial, caller.attempt, is_new=caller.is_new, take_over=caller.take_over,
            source=config.searcher.source_checkpoint_uuid, mark=caller.storage,
        ) as (claim, fence),
        KeptLedger(
            store, trial, fence.number, clock, ending, config.cost.per_slot_hour, logger
        ) as ledger,
        Report(
            config, trial, run_dir, store, caller.stopping, ledger.read, ending,
            logger=logger, publish=caller.publish, publish_errors=caller.publish_errors,
            has_metric=caller.script is None or caller.script.has_metric,
        ) as report,
        RunUpdates(
            config.name, trial, _told_of_progress(run_dir), ending, logger=logger
        ) as progress,
        ExitStack() as at_end,  # before the report, which stores the trackers' files
    ):  # fmt: skip
        tracking = Tracking(
            config, trial, run_dir, store, fence.number, ledger.read, ending, logger
        )
        # The report first: the trackers show its page.
        observer = Observers(report, progress, caller.observer, tracking, telemetry)
        try:
            at_end.enter_context(tracking)
            run = Run(
                config, trial, run_dir, store, observer, caller.stopping, claim, fence,
                caller.devices, clock, find_logger=caller.find_logger,
            )  # fmt: skip
            note_storage(store, fence.record.storage, logger)
            if not store.is_process_local:  # a later attempt cannot find it in any case
                caller.begun(fence.record.storage)
            observer.trial_owned(fence.number, ledger.earlier)
            result = _run_to_its_end(run, caller, report)
        except BaseException as error:
            observer.run_ended(how_it_ended(error, caller.stopping))
            raise
        observer.run_ended(status_of(result), result.tensorboard_url)
    return replace(result, ledger=ledger.read().to_json())  # only now it says that the run is over


def _run_to_its_end(run: Run, caller: Caller, report: Report) -> TrialResult:
    with _placed(run.config, run.run_dir, caller) as placement:
        ended = _driver(run, caller, placement, lambda: report.last_checkpoint).drive()
    launch, request = ended.launch, caller.stopping.final_request()
    return replace(
        ended.result,
        stop_reason=str(request) if request else None,
        trial_stop_reason=launch.answers.stop_reason,
        tensorboard_url=launch.status.tensorboard_url,
        report_path=str(report.path),
        run_dir=str(run.run_dir),
        throughput=run.throughput.throughput.to_json(),
    )


def _told_of_progress(run_dir: Path) -> list[Place]:
    endpoint = kubeflow_status()
    return [progress_file(run_dir), *([endpoint] if endpoint is not None else [])]


def try_trial(config: ExperimentConfig, trial: str, caller: Caller) -> Ended:
    """Train a batch of a trial, validate one, save, restore, and train one more.

    Nothing is kept, claimed or reported. Ranks that have joined save without an upload, and restore
    nothing. A script with its own loop is asked to end at its first report.

    Raises:
        RankFailed, Stalled, CheckpointError, TrialError: the trial failed.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    with (
        locked_run_dir(trial) as run_dir,
        _placed(config, run_dir, caller) as placement,
        ExitStack() as at_end,
    ):
        run = Run(
            config.model_copy(update={"max_restarts": 0}), trial, run_dir, store, caller.observer,
            caller.stopping, devices=caller.devices, find_logger=caller.find_logger,
            test_mode="keep nothing" if caller.script is not None else "restore",
        )  # fmt: skip

        def forget(kind: object, error: BaseException | None, traceback: object) -> None:
            try:
                store.forget_trial(trial)
            except CheckpointError as failure:
                if error is None:
                    raise
                run.logger.warning("what the test has stored is not deleted: %s", failure)

        driver = _driver(run, caller, placement)
        if run.test_mode == "restore":
            at_end.push(forget)
        ended = driver.drive()
        if run.test_mode == "restore" and ended.result.checkpoint_uuid is not None:
            clear_rank_files(run_dir)
            clear_kept(run_dir)  # else the restore would not read the storage
            ended = driver.drive()
        return ended


def _driver(
    run: Run, caller: Caller, placement: Placement, last_checkpoint: Callable[[], str] = str
) -> Driver:
    """Return the driver of a run, with a script's own parts if it has one."""
    follow: Follow = follow_run
    if (script := caller.script) is not None:
        follow, run.has_metric, run.how_to_go_on = (
            script.follow, script.has_metric, script.how_to_go_on,
        )  # fmt: skip
        if (choose := script.resume_points) is not None:
            run.choose_resume_points = lambda: choose(run.store, run.fence)
    return Driver(
        run, caller.stages, placement, FailurePolicy(placement, run.config.max_restarts), follow,
        has_code=script is None or (script.has_code and not run.test_mode),
        last_checkpoint=last_checkpoint,
        micro_batch_samples=caller.micro_batch_samples,
    )  # fmt: skip


def _placed(
    config: ExperimentConfig, run_dir: Path, caller: Caller
) -> AbstractContextManager[Placement]:
    if caller.script is not None:
        return nullcontext(caller.script.placement)
    return place_ranks(config, run_dir, announcer(caller.find_logger(), caller.observer))


def follow_run(launch: Launch, stages: Stages, uploads: Uploads) -> TrialResult:
    """Build the trial on launched ranks and train it, or run the experiment's script."""
    stages.build_trial(launch)
    if launch.run.config.is_script:
        return follow_script(launch, stages, uploads)
    return Loop(launch, stages, uploads).run()


class Driver:
    """Takes a run from state to state.

    Args:
        stages: the functions or Prefect tasks that execute the stages.
        policy: decides whether failed ranks are launched again.
        follow: trains on launched ranks.
        has_code: True if the code folder holds code that checkpoints should name.
        last_checkpoint: names the newest checkpoint, to be appended to a sentence.
        micro_batch_samples: of the first launch; None for the configured number.
    """

    def __init__(
        self,
        run: Run,
        stages: Stages,
        placement: Placement,
        policy: FailurePolicy,
        follow: Follow = follow_run,
        has_code: bool = True,
        last_checkpoint: Callable[[], str] = lambda: "",
        micro_batch_samples: int | None = None,
    ) -> None:
        self._run = run
        self._stages = stages
        self._placement = placement
        self._policy = policy
        self._follow = follow
        self._has_code = has_code
        self._last_checkpoint = last_checkpoint
        self._micro_batch_samples = micro_batch_samples
        self._story: deque[str] = deque(maxlen=STORY)
        self._stored_code: TrialCode | None = None

    def drive(self) -> Ended:
        """Drive the run to its end. Raises as `drive_trial`."""
        run = self._run
        run.clock.switch("launch")
        self._stored_code = stored_trial_code(
            run.config, run.store, run.trial, run.run_dir, run.logger
        )
        state: RunState = Launching()
        self._story.clear()
        while not isinstance(state, Ended):
            self._story.append(describe(state))
            try:
                state = self.next(state)
            except (Stopped, Superseded):
                raise
            except Exception:
                if len(self._story) > 2:  # else the error says it all
                    run.logger.error("how it came to this: %s", " → ".join(self._story))
                raise
        return state

    def next(self, state: RunState) -> RunState:
        """Carry out a state, and return the next one."""
        if isinstance(state, Launching):
            return self._launch(state)
        if isinstance(state, Completed):
            return self._after_training(state)
        if isinstance(state, Aborted):
            return self._after_interruption(state)
        if isinstance(state, RanksFailed):
            return self._after_failure(state)
        if isinstance(state, Restarting):
            return self._restart(state)
        if isinstance(state, Moving):
            return self._move(state)
        return state

    # ------------------------------------------------------------------------------ the states

    def _launch(self, state: Launching) -> RunState:
        """Launch ranks, and have them train."""
        run = self._run
        run.clock.switch("launch")
        code = self._stored_code
        if code is None and self._has_code:  # packed for each launch: it may have been corrected
            sends = self._placement.sends_code
            code = code_of_folder(run.config, run.store, run.logger, sends)
        launch = Launch(run, code, self._micro_batch_samples)
        if run.fence is not None:
            sweep_leftovers(run.store, run.trial, run.fence, run.logger)
        try:
            return Completed(launch, self.train_once(launch))
        except (RankFailed, Stalled, LaunchError, TopologyMismatch) as failure:
            run.clock.switch("idle")
            if isinstance(failure, Stalled):
                run.observer.stalled(failure.during, failure.seconds, str(failure))
            return RanksFailed(launch, failure)
        except Stopped as stopped:
            return Aborted(launch, stopped, state.saved)
        except (CheckpointError, TrialError) as failure:
            if run.stopping.request is None:
                raise
            raise type(failure)(f"{failure}{self._last_checkpoint()}") from failure

    def train_once(self, launch: Launch) -> TrialResult:
        """Launch the ranks, and train until the run ends, is stopped or moves to other nodes."""
        run, stages = self._run, self._stages
        # In this order: uploads need the ranks, and end before or (memory://) after them.
        with (
            Uploads(launch, stages) as uploads,
            launch_slots(launch, self._placement) as launch.slots,
            stopping_ranks(launch),
            self._placement.watching(launch),
        ):
            try:
                run.clock.switch("idle")
                return self._follow(launch, stages, uploads)
            except RankFailed as failure:
                launch.note_failure(failure)
                raise
            finally:
                self._policy.launch_ended(launch)
                if launch.status.has_trained:
                    self._placement.has_trained()

    def _after_training(self, state: Completed) -> RunState:
        launch, result = state.launch, state.result
        if launch.moves_after(result.stopped_early):
            why = launch.status.moves
            return Moving(f"saved, to continue on other nodes: {why}", result)
        if not result.stopped_early:
            clear_kept(self._run.run_dir)
        return Ended(launch, result)

    def _after_interruption(self, state: Aborted) -> RunState:
        progress = state.launch.status
        if progress.moves and self._run.stopping.request is None:
            what = f"ended before training, to continue on other nodes: {progress.moves}"
            return Moving(what, state.saved)
        if state.saved is None or progress.can_save:
            raise Stopped(f"{state.why}{self._last_checkpoint()}") from state.why
        return Ended(state.launch, state.saved)

    def _after_failure(self, state: RanksFailed) -> RunState:
        run, failure = self._run, state.failure
        if isinstance(failure, (RankFailed, Stalled)) and run.stopping.request is not None:
            run.logger.error("%s", failure.report())
            raise Stopped(f"{while_stopping(failure)}{self._last_checkpoint()}") from failure
        granted = self._policy.grant(failure, state.launch)
        if granted is None:
            raise failure
        return Restarting(failure, granted)

    def _restart(self, state: Restarting) -> RunState:
        decision, why = state.decision, str(state.failure)
        if decision.micro_batch_samples is not None:
            self._micro_batch_samples = decision.micro_batch_samples
        if decision.leaves_out is not None:
            self._placement.leave_out(decision.leaves_out)
        if decision.retreats:
            self._placement.retreat(why)
        if decision.leaves is not None:
            self._placement.leave(decision.leaves, why)
        clear_rank_files(self._run.run_dir)
        if self._run.stopping.wait(decision.pause_seconds):
            raise Stopped(f"no ranks ran{self._last_checkpoint()}") from state.failure
        return Launching()  # a newer checkpoint may be stored than the earlier launch saved

    def _move(self, state: Moving) -> RunState:
        self._run.observer.moving(state.what)
        clear_rank_files(self._run.run_dir)
        return Launching(state.saved)


def while_stopping(failure: Exception) -> str:
    """Describe a failure during a stop, which may have come before or after the save."""
    return f"failed while stopping: {failure}"
