"""The story of a run: its ranks are placed and launched, and train until the run ends.

`drive_trial` opens the storage, the report and the trackers. `Driver` takes the run from state to
state (`states.py`). The failure policy decides whether failed ranks are launched again, and the
placement where. While ranks live, `Driver.train_once` runs the loop, or serves a script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from trial_core.checkpoint.retention.known_storages import note_storage
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import TrialCode, code_of_folder
from trial_core.config import ExperimentConfig
from trial_core.driver.code_source import stored_trial_code
from trial_core.driver.failure_policy import FailurePolicy
from trial_core.driver.follow_script import follow_fit, follow_script
from trial_core.driver.loop import Loop
from trial_core.driver.placement import Placement, announcer, place_ranks
from trial_core.driver.result import TrialResult, status_of
from trial_core.driver.run import Given, Launch, Run, TestMode
from trial_core.driver.stages.build import build_trial
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
from trial_core.observe.events.observers import Observers
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.observe.ledger.stored_ledger import KeptLedger
from trial_core.observe.report.kubeflow_status import kubeflow_status
from trial_core.observe.report.live_report import Report
from trial_core.observe.report.run_updates import Place, RunUpdates, progress_file
from trial_core.observe.telemetry.run_telemetry import run_telemetry
from trial_core.observe.trackers.tracking import Tracking, check_trackers, tracker_pages
from trial_core.processes.machine.run_dirs import clear_kept, clear_rank_files, locked_run_dir
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import how_it_ended

STORY = 12
"""The error of a failed run lists so many of its last states."""


def drive_trial(
    config: ExperimentConfig, trial: str, given: Given, joining: Placement | None = None
) -> TrialResult:
    """Train a trial until it ends or is asked to stop; restart failed ranks.

    Args:
        joining: waits for the ranks of a script, which another program has started; None if the run
            launches its ranks.

    Raises:
        ConfigError: a tracker is not installed, or does not have one of its options.
        TrialflowError: another run that may be live has the trial; or its id is taken.
        CheckpointNotFound, StorageError: the trial is not in this storage.
        RankFailed, Stalled: the ranks failed, and no restart is left or would help.
        Stopped: the run was asked to stop before it could save.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    check_trackers(config)
    store.storage.check_usable()
    clock, logger = RunClock(given.waited_seconds), given.find_logger()
    ending = Ending(given.stopping)
    with (
        # Ends last: a slow backend must delay neither the ledger nor the release of the trial.
        run_telemetry(config, trial, clock, given.stopping, ending, logger) as telemetry,
        locked_run_dir(trial, given.takeover_wait_seconds, given.task) as run_dir,
        # Once, not per restart: a restart must not take the trial back from a newer run.
        own_trial(
            store, trial, given.attempt, is_new=given.is_new, take_over=given.take_over,
            source=config.searcher.source_checkpoint_uuid, mark=given.storage,
        ) as (claim, fence),
        KeptLedger(
            store, trial, fence.number, clock, ending, config.cost.per_slot_hour, logger
        ) as ledger,
        Report(
            config, trial, run_dir, store, given.stopping, ledger.read, ending,
            logger=logger, publish=given.publish, publish_errors=given.publish_errors,
            has_metric=given.has_metric, links={**given.links, **tracker_pages(config)},
        ) as report,
        RunUpdates(
            config.name, trial, _told_of_progress(run_dir), ending, logger=logger
        ) as progress,
        ExitStack() as at_end,  # before the report, which stores the trackers' files
    ):  # fmt: skip
        tracking = Tracking(
            config, trial, run_dir, store, fence.number, ledger.read, ending, logger,
            report.trackers_lack,
        )  # fmt: skip
        # The report first: the trackers show its page.
        observer = Observers(report, progress, given.observer, tracking, telemetry)
        try:
            at_end.enter_context(tracking)
            run = Run(
                config, trial, run_dir, store, claim, fence, clock,
                **vars(replace(given, observer=observer)),
            )  # fmt: skip
            note_storage(store, fence.record.storage, logger)
            if not store.is_process_local:  # a later attempt cannot find it in any case
                given.begun(fence.record.storage)
            observer.trial_owned(fence.number, ledger.earlier)
            result = _run_to_its_end(run, report, _placed(config, run_dir, given, joining))
        except BaseException as error:
            observer.run_ended(how_it_ended(error, given.stopping))
            raise
        observer.run_ended(status_of(result), result.tensorboard_url)
    return replace(result, ledger=ledger.read().to_json())  # only now it says that the run is over


def _run_to_its_end(
    run: Run, report: Report, placed: AbstractContextManager[Placement]
) -> TrialResult:
    with placed as placement:
        ended = Driver(run, placement, lambda: report.last_checkpoint).drive()
    launch, request = ended.launch, run.stopping.final_request()
    return replace(
        ended.result,
        stop_reason=str(request) if request else ended.result.stop_reason,
        trial_stop_reason=launch.answers.stop_reason,
        tensorboard_url=launch.status.tensorboard_url,
        report_path=str(report.path),
        run_dir=str(run.run_dir),
        throughput=run.throughput.throughput.to_json(),
    )


def _told_of_progress(run_dir: Path) -> list[Place]:
    endpoint = kubeflow_status()
    return [progress_file(run_dir), *([endpoint] if endpoint is not None else [])]


def try_trial(
    config: ExperimentConfig,
    trial: str,
    given: Given,
    joining: Placement | None = None,
    test_mode: TestMode | None = None,
) -> Ended:
    """Train a batch of a trial, validate one, save, restore, and train one more.

    Nothing is kept, claimed or reported. Ranks that have joined save without an upload, and restore
    nothing. A script with its own loop is asked to end at its first report. In the mode
    ``compare``, it restores the resume point that `given` chooses, and ends then.

    Raises RankFailed, Stalled, CheckpointError or TrialError if the trial failed.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    with (
        locked_run_dir(trial) as run_dir,
        _placed(config, run_dir, given, joining) as placement,
        ExitStack() as at_end,
    ):
        run = Run(
            config, trial, run_dir, store,
            test_mode=test_mode or ("keep nothing" if joining else "restore"), **vars(given),
        )  # fmt: skip

        def forget(kind: object, error: BaseException | None, traceback: object) -> None:
            try:
                store.forget_trial(trial)
            except CheckpointError as failure:
                if error is None:
                    raise
                run.logger.warning("what the test has stored is not deleted: %s", failure)

        driver = Driver(run, placement)
        if run.test_mode == "restore":
            at_end.push(forget)
        ended = driver.drive()
        if run.test_mode == "restore" and ended.result.checkpoint_uuid is not None:
            clear_rank_files(run_dir)
            clear_kept(run_dir)  # else the restore would not read the storage
            ended = driver.drive()
        return ended


def _placed(
    config: ExperimentConfig, run_dir: Path, given: Given, joining: Placement | None
) -> AbstractContextManager[Placement]:
    if joining is not None:
        return nullcontext(joining)
    return place_ranks(config, run_dir, announcer(given.find_logger(), given.observer))


def launch_slots(launch: Launch, placement: Placement) -> SlotGroup:
    """Launch the ranks. The result is a context manager that ends them."""
    run = launch.run
    launch.world_size, launcher = placement.prepare(launch)
    run.clock.has_slots(launch.world_size)
    return SlotGroup(
        launch.world_size,
        working_dir=launch.code.folder,
        log_dir=run.run_dir / "logs",
        environment=run.config.rank_variables,
        launcher=launcher,
        on_batches=launch.note_batches,
        on_log=run.observer.rank_logged,
        on_activity=launch.note_activity,
        on_script=launch.note_script_event,
        on_stop_signal=run.stopping.ask,
        should_abort=lambda: run.stopping.request is not None,
    )


@contextmanager
def stopping_ranks(launch: Launch) -> Iterator[None]:
    """Pass stop requests on to the ranks during the block (step 4 of `stop_requests`)."""

    def stop() -> None:
        if launch.status.can_save:
            launch.slots.stop()
        else:
            launch.slots.abort("nothing to save: training had not begun")

    def end() -> None:
        launch.slots.abort("not saved: the grace period was over, or a second signal came")

    with launch.run.stopping.subscribed(stop, end):
        yield


def follow_run(launch: Launch, uploads: Uploads) -> TrialResult:
    """Build the trial on launched ranks and train it, or run the experiment's script."""
    if (fit := launch.run.fit) is not None:
        return follow_fit(launch, uploads, fit, None)
    build_trial(launch)
    if launch.run.config.is_script:
        return follow_script(launch, uploads)
    return Loop(launch, uploads).run()


class Driver:
    """Takes a run from state to state. `last_checkpoint` ends a sentence with the newest one."""

    def __init__(
        self, run: Run, placement: Placement, last_checkpoint: Callable[[], str] = str
    ) -> None:
        self._run = run
        self._placement = placement
        self._policy = FailurePolicy(
            placement.pool, 0 if run.test_mode else run.config.max_restarts
        )
        self._last_checkpoint = last_checkpoint
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
        # A test of a script keeps nothing.
        if (
            code is None and run.has_code and run.test_mode != "keep nothing"
        ):  # packed for each launch: it may have been corrected
            sends = self._placement.sends_code
            code = code_of_folder(run.config, run.store, run.logger, sends)
        launch = Launch(run, code)
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
        run = self._run
        # In this order: uploads need the ranks, and end before or (memory://) after them.
        with (
            Uploads(launch) as uploads,
            launch_slots(launch, self._placement) as launch.slots,
            stopping_ranks(launch),
            self._placement.watching(launch),
        ):
            try:
                run.clock.switch("idle")
                return follow_run(launch, uploads)
            except RankFailed as failure:
                launch.note_failure(failure)
                raise
            finally:
                self._policy.launch_ended(launch)
                if launch.status.has_trained and self._placement.pool is not None:
                    self._placement.pool.has_trained()

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
        if run.stopping.request is not None:
            if not isinstance(failure, (RankFailed, Stalled)):
                raise type(failure)(f"{failure}{self._last_checkpoint()}") from failure
            run.logger.error("%s", failure.report())
            raise Stopped(f"{while_stopping(failure)}{self._last_checkpoint()}") from failure
        granted = self._policy.grant(failure, state.launch)
        if granted is None:
            raise failure
        return Restarting(failure, granted)

    def _restart(self, state: Restarting) -> RunState:
        decision, why = state.decision, str(state.failure)
        if decision.micro_batch_samples is not None:
            self._run.micro_batch_samples = decision.micro_batch_samples
        if (pool := self._placement.pool) is not None:
            if decision.leaves_out is not None:
                pool.leave_out(decision.leaves_out)
            if decision.retreats:
                pool.retreat(why)
            if decision.leaves is not None:
                pool.leave(decision.leaves, why)
        clear_rank_files(self._run.run_dir)
        if decision.pause_seconds:
            self._run.logger.warning(
                "the ranks are launched again in %d s: no checkpoint was stored since the restart "
                "before this one", decision.pause_seconds,
            )  # fmt: skip
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
