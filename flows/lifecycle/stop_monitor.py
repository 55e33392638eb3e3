"""Turns signals, Prefect's states and the time budget into stop requests of a run.

Prefect stops a flow by raising in the middle of its work. The stop monitor takes the signal first,
so that the run can save; afterwards it lets Prefect act as usual. Where no signal comes (Suspend, a
Cancel whose worker is gone), the monitor sees the stop in the flow run's state.

The whole route of a stop: `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Cancelled, Running, Suspended

from trial_core.config.sections import StoppingConfig
from trial_core.driver.drive import while_stopping
from trial_core.errors import Stopped, Superseded
from trial_core.schedule.stop_requests import StopHandler, StopRequest
from trialflow.flows.lifecycle.detached_engine import has_lost_supervisor, ignore_broken_output
from trialflow.flows.lifecycle.final_state import CANCEL_STATES, Step, StoppedRun, steps_to_end
from trialflow.flows.lifecycle.flow_run_state import (
    FlowRunReader,
    has_queue,
    hold_suspended,
    set_state,
)
from trialflow.flows.lifecycle.message_kept import keep_message
from trialflow.flows.lifecycle.parent_runs import ParentRuns, stop_handler_of_caller
from trialflow.flows.lifecycle.server_outage import ServerOutage, reports_kept
from trialflow.flows.lifecycle.stop_signals import Interrupted, StopSignals
from trialflow.flows.server.embedded_server import is_unauthorized
from trialflow.tasks.artifact import forget_unsent, send_unsent
from trialflow.tasks.client_retries import NO_ANSWER, client_retries

T = TypeVar("T")

POLL_SECONDS = 5.0
AWAIT_SECONDS = 1.0
# A busy server leaves a single request without an answer.
UNANSWERED_READS = 2
SILENT = "No heartbeat for"
"""The first words of the message of the automation that marks silent runs as crashed."""

# Another party considers the run dead or ended, and may have scheduled it again.
_ENDED_STATES = (
    StateType.CRASHED, StateType.FAILED, StateType.COMPLETED,
    StateType.SCHEDULED, StateType.PENDING,
)  # fmt: skip


class StopMonitor:
    """Requests a stop when a signal, the flow run's state or the time budget says so.

    A context manager. A second signal requests an immediate end. While the server does not answer,
    the run continues and keeps its reports.

    Args:
        stopping: receives the requests.
        settings: the time budget, and how long the server may be away.
    """

    def __init__(self, stopping: StopHandler, settings: StoppingConfig) -> None:
        self._stopping = stopping
        self._budget_seconds = settings.time_budget_seconds
        self._outage = ServerOutage(settings.server_outage_seconds)
        self._reports = reports_kept(self._outage)
        self._reader = FlowRunReader(UUID(str(runtime.flow_run.id)))
        context = FlowRunContext.get()
        run = context.flow_run if context else None
        # Read here: in a signal handler, `runtime` would call the server.
        self._is_subflow = run is not None and run.parent_task_run_id is not None
        self._parents = ParentRuns(run.parent_task_run_id if run else None)
        self._caller = stop_handler_of_caller()
        self._ends_with_parent = False
        self._has_queue = has_queue(run)
        self._is_deployed = run is not None and run.deployment_id is not None
        # Not part of Prefect's public API. Releases without it suspend by state alone.
        self._suspension = getattr(context, "flow_run_suspension_request", None)
        self._attempt: int | None = None
        self._alive_message = (
            "it was silent while the server was away, and runs "
            f"(process {os.getpid()} on {socket.gethostname()})"
        )
        self._logger = get_run_logger()
        self._has_ended = threading.Event()
        # Wakes the polling thread. A queue, because a signal handler may not set an event.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._signals = StopSignals(stopping, self._has_queue, lambda: self._wakes.put(None))
        # The thread needs this context's Prefect settings and client.
        here = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: here.run(self._poll), name="stop-monitor", daemon=True
        )
        # A separate timer: a slow server may block the polling thread.
        seconds = self._budget_seconds or 0
        self._budget = threading.Timer(
            seconds, stopping.ask, ("time budget", f"{seconds:g} s are over")
        )
        self._budget.daemon = True

    def __enter__(self) -> StopMonitor:
        self._reports.__enter__()
        self._signals.install()
        if self._suspension is not None:
            # Prefect would end a suspended run, unsaved, at its next task. `final_state` ends it.
            self._suspension.raise_if_requested = lambda: None
        ignore_broken_output()
        if self._budget_seconds is not None:
            self._budget.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._wakes.put(None)
        self._budget.cancel()
        self._thread.join()
        self._signals.restore()
        self._reports.__exit__(None, None, None)
        if self._suspension is not None:
            vars(self._suspension).pop("raise_if_requested", None)

    def run(
        self, work: Callable[[], T], describe: Callable[[T], str] = lambda result: ""
    ) -> T | State[Any]:
        """Call `work`; return its result, or the final state of a run that was stopped.

        Args:
            describe: describes the outcome of a stopped run, from its result.

        Raises:
            BaseException: any exception of `work` or of `final_state`.
        """
        try:
            result = work()
        except Exception as failure:
            self.await_server()
            self._send_reports()
            outcome = str(failure) if isinstance(failure, Stopped) else while_stopping(failure)
            if (state := self.final_state(outcome, failure)) is not None:
                return state
            if isinstance(failure, Stopped) and self._stopping.request is not None:
                raise Stopped(f"{self._stopping.request}; {outcome}") from failure
            raise
        self.await_server()
        self._send_reports()
        state = self.final_state(describe(result))
        return result if state is None else state

    def await_server(self) -> None:
        """Wait until the server answers, within the limits of outage and stop.

        A server that refuses this run's password was started again, and will always refuse it.
        """
        has_logged = False
        while not (self._outage.is_too_long or self._stopping.has_expired):
            try:
                self._read_run()
            except NO_ANSWER as error:
                if is_unauthorized(error):
                    return
                if not has_logged:
                    self._logger.warning("waiting for the server, to report to it")
                has_logged = True
                time.sleep(AWAIT_SECONDS)
            else:
                return

    def final_state(self, outcome: str, failure: BaseException | None = None) -> State[Any] | None:
        """Return the state for a stopped flow run, or None to leave the state to Prefect.

        One line of the log says who asked for the stop, and the outcome.

        Args:
            outcome: a text about the saved work or the failure, for people.
            failure: the exception that ended the run, if one did.

        Raises:
            Pause: the run was suspended, and stays so until it is resumed.
            Abort: the run was preempted, and is back in its queue; or another party has set its
                final state, or started another attempt. The server's state stays.
            Interrupted: Ctrl-C ended a run without a queue, which is now Cancelled.
            Stopped: as Abort, in a subflow.
            BaseException: Prefect's exception for the signal that stopped the run.
        """
        request = self._stopping.final_request()
        if request is None:
            run = self._try_read_run() if isinstance(failure, Superseded) else None
            if run is not None and self._is_other_attempt(run):
                raise self._keep_state(str(failure))
            return None
        run = self._try_read_run()
        state = None if run is None else run.state
        if state is not None and state.type in CANCEL_STATES and request.is_signal:
            request = StopRequest("cancelled", "in Prefect")  # after the signal
        reason = f"{request}; {outcome}" if outcome else str(request)
        is_error = failure is not None and not isinstance(failure, Stopped)
        self._logger.log(logging.ERROR if is_error else logging.INFO, "stopped: %s", reason)
        suspended = self._suspension.get_state() if self._suspension is not None else None
        steps = steps_to_end(
            StoppedRun(
                request.reason,
                state=None if state is None else state.type,
                has_other_attempt=run is not None and self._is_other_attempt(run),
                is_deployed=self._is_deployed,
                is_subflow=self._is_subflow,
                is_suspended=suspended is not None,
                ends_with_parent=self._ends_with_parent,
                is_in_main_thread=self._signals.is_in_main_thread,
                has_signal=self._signals.received is not None,
                has_queue=self._has_queue,
            )
        )
        if Step.REQUEUE in steps and set_state(AwaitingRetry(message=reason)):
            raise Abort(f"{reason}: scheduled again")
        if Step.END_BY_SIGNAL in steps and self._signals.received is not None:
            self._end_by_signal(self._signals.received, reason)
        return self._end(steps[-1], reason, run, suspended)

    def _end(
        self, step: Step, reason: str, run: FlowRun | None, suspended: State[Any] | None
    ) -> State[Any] | None:
        """Carry out the last step: return or raise as `final_state`."""
        state = None if run is None else run.state
        if step is Step.LEAVE_TO_PREFECT:
            return None
        if step is Step.CANCEL:
            return self._cancelled(reason)
        if step is Step.CANCEL_UNRESUMABLE:
            why = "a run without a deployment cannot be resumed in Prefect"
            return self._cancelled(f"{reason}; {why}", is_forced=True)
        if step is Step.HOLD_PAUSE and run is not None:
            with suppress(*NO_ANSWER):
                hold_suspended(run.id)
            raise Pause(f"suspended: {reason}", state=state)
        if step is Step.SUSPEND_WITH_PARENT:  # else Prefect would show it as running
            set_state(Cancelled(message=f"It continues when its parent run does: {reason}"))
        if step in (Step.SUSPEND, Step.SUSPEND_WITH_PARENT):
            raise Pause(f"suspended: {reason}", state=suspended or Suspended())
        if step is Step.LEAVE_TO_OTHER_ATTEMPT:
            raise self._keep_state(f"{reason}: another attempt has started")
        if state is not None and state.type != StateType.RUNNING:
            raise self._keep_state(f"{reason}: it stays {state.name}")
        raise self._keep_state(reason)

    def _cancelled(self, reason: str, is_forced: bool = False) -> State[Any]:
        """The state Cancelled. In a deployment's run, or if `is_forced`, it is set here.

        Raises:
            Abort: it is set. Prefect would log the traceback of a cancelled run as an error.
        """
        cancelled: State[Any] = Cancelled(message=f"Stopped: {reason}")
        if (self._is_deployed or is_forced) and set_state(cancelled):
            if self._signals.received is not None:  # from a runner, which sets the state, too
                with suppress(OSError):
                    keep_message(f"Stopped: {reason}")
            raise Abort(reason)
        return cancelled

    def _end_by_signal(self, number: signal.Signals, reason: str) -> None:
        """End a run without a queue as Cancelled, and raise the exception that its caller expects.

        Prefect would show a crash. Prefect ends a subflow together with its parent, by the signal.
        """
        self._signals.restore()
        # Not of a deployment's run within a flow: an automation schedules it again if it crashes.
        is_set = not (self._is_subflow and self._is_deployed) and set_state(
            Cancelled(message=f"Stopped: {reason}")
        )
        if is_set and not self._is_subflow and number == signal.SIGINT:
            raise Interrupted(reason)
        signal.raise_signal(number)

    # ----------------------------------------------------------------------- stop requests

    def _poll(self) -> None:
        failures, has_lost_worker = 0, False
        pause = 0.0  # the first request learns which attempt this is
        while True:
            with suppress(queue.Empty):
                self._wakes.get(timeout=pause)
            if self._has_ended.is_set():
                return
            pause = POLL_SECONDS
            had_signal = self._signals.received is not None
            if has_lost_supervisor() and not has_lost_worker:
                has_lost_worker = True
                if self._stopping.request is not None:  # the second request, as with signals
                    self._stopping.kill_now()
                self._stopping.ask("preempted", "its worker was stopped")
            self._check_caller()
            try:
                self._check_state()
            except NO_ANSWER as error:
                failures += 1
                if failures == UNANSWERED_READS:
                    self._logger.warning(
                        "the flow run's state cannot be read, so a Cancel is not seen before the "
                        "server answers again (logged once; training continues): %s: %s",
                        type(error).__name__, error,
                    )  # fmt: skip
                if self._outage.is_too_long:
                    limit = self._outage.limit_seconds
                    self._stopping.ask("server lost", f"it has not answered for {limit:g} s")
            if had_signal:  # the state was read after it, and tells whether it was a Cancel
                self._stopping.clarified()

    def _check_state(self) -> None:
        if self._suspension is not None and (suspended := self._suspension.get_state()):
            # The run, or the one whose subflow it is.
            self._suspend(suspended.state_details.flow_run_id or self._reader.flow_run_id)
        run = self._read_run()
        state = None if run is None else run.state
        if run is None:
            self._stopping.ask("cancelled", "its flow run was deleted")
        elif self._is_other_attempt(run):
            # This attempt was presumed dead. It could not commit a checkpoint any more.
            self._stopping.ask("cancelled", "another attempt at its flow run has started")
            self._stopping.kill_now()
        elif state is None:
            self._check_parents()
        elif state.name == "Crashed" and (state.message or "").startswith(SILENT):
            self._say_that_it_runs(run)
        elif state.type in CANCEL_STATES:
            self._stopping.ask("cancelled", "in Prefect")
        elif state.type == StateType.PAUSED:
            self._suspend(run.id)
        elif state.type in _ENDED_STATES:
            self._stopping.ask("cancelled", f"its flow run was set to {state.name}")
        else:
            self._check_parents()

    def _check_caller(self) -> None:
        """Stop with the run that called this one, which may have been asked before this began."""
        if self._caller is not None and (request := self._caller.request) is not None:
            self._ends_with_parent = True
            self._stopping.ask(request.reason, request.detail)
            if self._caller.has_expired:
                self._stopping.kill_now()

    def _check_parents(self) -> None:
        """Stop this run if the run that it is part of ends: Prefect does not tell it."""
        if (stop := self._parents.stop()) is not None:
            self._ends_with_parent = True
            if stop.reason == "suspended":
                self._suspend(stop.flow_run_id)
            self._stopping.ask(stop.reason, stop.detail)
            if stop.is_superseded:
                self._stopping.kill_now()

    def _suspend(self, flow_run_id: UUID) -> None:
        """Have the run save and end. The pause is held first, because the end sets the state."""
        try:
            if self._is_deployed or self._is_subflow:  # others cannot be resumed
                hold_suspended(flow_run_id)
        finally:
            self._stopping.ask("suspended", "in Prefect")

    # ------------------------------------------------------------------------- the flow run

    def _read_run(self) -> FlowRun | None:
        """Request the flow run once; None if it was deleted. Raises one of `NO_ANSWER`."""
        answers_before = self._outage.answers
        try:
            with client_retries(0):
                run = self._reader.read()
        except NO_ANSWER:
            self._outage.did_not_answer(answers_before)
            raise
        self._outage.answered()
        return run

    def _try_read_run(self) -> FlowRun | None:
        """Return the flow run, or None if it was deleted or the server does not answer."""
        try:
            return self._read_run() if self._outage.is_on else self._reader.read()
        except NO_ANSWER:
            return None

    def _send_reports(self) -> None:
        """Send the reports that the run could not write while the server was away."""
        try:
            if not self._outage.is_on:
                send_unsent()
        except NO_ANSWER as error:
            self._logger.warning("the report on this page is not the last one: %s", error)
        finally:
            forget_unsent()

    def _say_that_it_runs(self, run: FlowRun) -> None:
        """Correct the state of a run that was presumed dead because its server was away."""
        # Once: the automation schedules the run again after ten seconds.
        with client_retries(0), get_client(sync_client=True) as client:
            running: State[Any] = Running(message=self._alive_message)
            client.set_flow_run_state(run.id, running, force=True)
        # Prefect counts it as a start. A new read might already count another attempt as well.
        self._attempt = run.run_count + 1

    def _is_other_attempt(self, run: FlowRun) -> bool:
        """Return whether another process has started the run since. Prefect counts the starts."""
        # The answer to a correction may have been lost: then it counts unnoticed.
        has_corrected = run.state is not None and run.state.message == self._alive_message
        if self._attempt is None or has_corrected:
            self._attempt = run.run_count
        return run.run_count != self._attempt

    def _keep_state(self, reason: str) -> BaseException:
        """An exception that leaves the flow run in its present state."""
        return Stopped(reason) if self._is_subflow else Abort(reason)
