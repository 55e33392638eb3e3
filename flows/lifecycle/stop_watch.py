"""Who asks a run to stop, and what becomes of its flow run when it has.

Prefect's own way to stop a flow is to raise in the middle of whatever it does. Here the signal is
taken first, the run saves, and only then is what Prefect would have done let happen. Where no
signal comes (Suspend, a Cancel whose worker is gone), the flow run's own state tells.
"""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, Pause, PrefectException
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from trial_core.errors import Stopped, Superseded
from trial_core.run.observer import current_observer
from trial_core.run.stop_request import StopHandler, StopReason
from trialflow.flows.lifecycle.detached_engine import (
    has_lost_its_keeper,
    outlive_whoever_reads_the_output,
)
from trialflow.flows.lifecycle.requeue import came_from_a_queue, is_back_in_its_queue

T = TypeVar("T")

LOOK_SECONDS = 5.0
# One Ctrl-C may arrive twice: from the terminal, and from a parent that hands it on.
SAME_REQUEST_SECONDS = 1.0

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_IS_TO_CANCEL = (StateType.CANCELLING, StateType.CANCELLED)
# Somebody takes it for dead, and may have scheduled it again.
_IS_DECLARED_OVER = (
    StateType.CRASHED, StateType.FAILED, StateType.COMPLETED,
    StateType.SCHEDULED, StateType.PENDING,
)  # fmt: skip


class StopWatch:
    """For the length of the block, has signals, the flow run's state and the time budget ask
    `stopping`. A second signal asks for an end at once.

    Args:
        time_budget_seconds: None: no limit.
    """

    def __init__(self, stopping: StopHandler, time_budget_seconds: float | None) -> None:
        self._stopping = stopping
        self._budget_seconds = time_budget_seconds
        self._flow_run_id = UUID(str(runtime.flow_run.id))
        context = FlowRunContext.get()
        run = context.flow_run if context else None
        # Known here: asking `runtime` later is a call to the server, of a signal handler.
        self._is_subflow = run is not None and run.parent_task_run_id is not None
        self._is_deployed = came_from_a_queue(run)
        # A part of Prefect without a public face; releases that have none suspend by state alone.
        self._suspension = getattr(context, "flow_run_suspension_request", None)
        self._attempt: int | None = None
        self._logger = get_run_logger()
        self._before: dict[int, Any] = {}
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._is_over = threading.Event()
        # Prefect's settings, and the way to its server, are those of this context.
        here = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: here.run(self._watch), name="stop-watch", daemon=True
        )
        # Not the thread's work: the server may keep that one waiting.
        self._budget = threading.Timer(time_budget_seconds or 0, self._budget_is_over)
        self._budget.daemon = True

    def __enter__(self) -> StopWatch:
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        if self._suspension is not None:
            # Prefect would end a suspended run, unsaved, at its next task; `conclude` ends it.
            self._suspension.raise_if_requested = lambda: None
        outlive_whoever_reads_the_output()
        if self._budget_seconds is not None:
            self._budget.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._budget.cancel()
        self._thread.join()
        self._give_signals_back()
        if self._suspension is not None:
            vars(self._suspension).pop("raise_if_requested", None)

    def concluding(self, work: Callable[[], T]) -> T | State[Any]:
        """Do the run's work; what comes of it, or the state that a run gets that was stopped.

        Raises:
            BaseException: what `work` raises, or as `conclude`.
        """
        try:
            result = work()
        except Exception as failure:
            if self._stopping.request is not None:
                self._logger.error("%s, and could not save: %s", self._stopping.request, failure)
            if (state := self.conclude(failure)) is not None:
                return state
            raise
        state = self.conclude()
        return result if state is None else state

    def conclude(self, failure: BaseException | None = None) -> State[Any] | None:
        """The run has ended: the state that its flow run gets if it was stopped. None: its own.

        Args:
            failure: what it ended with, if it could not save.

        Raises:
            Pause: it was suspended, and stays so until it is resumed.
            Abort: it was preempted, and has been put back into its queue; or somebody has declared
                how it ended, or begun another attempt at it: its state is theirs.
            Stopped: the same, where another flow has called this one.
            BaseException: what the signal that stopped it would have raised at once.
        """
        asked = self._stopping.request
        if asked is None:
            run = self._run_if_known() if isinstance(failure, Superseded) else None
            if run is not None and self._is_anothers(run):
                raise self._left_alone(str(failure))
            return None
        said = str(asked) if failure is None else f"{asked}; not saved: {failure}"
        run = self._run_if_known()
        state = None if run is None else run.state
        if run is not None and self._is_anothers(run):
            raise self._left_alone(f"{said}: another attempt has begun")
        if self._suspension is not None and (suspended := self._suspension.get_state()):
            raise Pause(f"suspended: {said}", state=suspended)
        if state is not None and state.type == StateType.PAUSED:
            raise Pause(f"suspended: {said}", state=state)
        if state is not None and state.type in _IS_TO_CANCEL:
            return Cancelled(message=f"Stopped: {said}")
        if asked.reason == "time budget":
            return None
        if state is not None and state.type != StateType.RUNNING:
            raise self._left_alone(f"{said}: it stays {state.name}")
        is_to_go_on = state is not None and self._is_deployed and asked.reason == "preempted"
        if is_to_go_on and is_back_in_its_queue(said):
            raise Abort(f"{said}: scheduled again")
        if self._signal is not None:
            self._give_signals_back()
            signal.raise_signal(self._signal)
        raise self._left_alone(said)

    # ----------------------------------------------------------------------- who asks

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled_at = number, now
            why: StopReason = "preempted" if self._is_deployed else "interrupted"
            self._stopping.ask(why, _SIGNALS[signal.Signals(number)])
            current_observer().stopping(_SIGNALS[signal.Signals(number)])
        elif now - self._signalled_at >= SAME_REQUEST_SECONDS:
            self._stopping.kill_now()
            # What may keep the run from ending now is not its ranks: a third is not for us.
            self._give_signals_back()

    def _budget_is_over(self) -> None:
        self._stopping.ask("time budget", f"{self._budget_seconds:g} s are over")

    def _watch(self) -> None:
        has_warned = is_alone = False
        pause = 0.0  # the first look is to learn which attempt this is
        while not self._is_over.wait(pause):
            pause = LOOK_SECONDS
            if has_lost_its_keeper() and not is_alone:
                is_alone = True
                if self._stopping.request is not None:  # and its worker would not wait any longer
                    self._stopping.kill_now()
                self._stopping.ask("preempted", "its worker was stopped")
            try:
                self._look()
            except (httpx.HTTPError, PrefectException, OSError, ValueError, RuntimeError) as error:
                if not has_warned:
                    self._logger.warning(
                        "whether this run was cancelled cannot be seen (said once, training goes "
                        "on): %s: %s", type(error).__name__, error,
                    )  # fmt: skip
                has_warned = True

    def _look(self) -> None:
        if self._suspension is not None and self._suspension.is_requested():
            self._stopping.ask("suspended", "in Prefect")
            return
        run = self._flow_run()
        state = None if run is None else run.state
        if run is None:
            self._stopping.ask("cancelled", "its flow run was deleted")
        elif self._is_anothers(run):
            # Declared dead, and taken up again: what this one would save is nobody's any more.
            self._stopping.ask("cancelled", "another attempt at its flow run has begun")
            self._stopping.kill_now()
        elif state is not None and state.type in _IS_TO_CANCEL:
            self._stopping.ask("cancelled", "in Prefect")
        elif state is not None and state.type == StateType.PAUSED:
            self._stopping.ask("suspended", "in Prefect")
        elif state is not None and state.type in _IS_DECLARED_OVER:
            self._stopping.ask("cancelled", f"its flow run was declared {state.name}")

    # ------------------------------------------------------------------ how it ends

    def _flow_run(self) -> FlowRun | None:
        with get_client(sync_client=True) as client:
            try:
                return client.read_flow_run(self._flow_run_id)
            except ObjectNotFound:
                return None

    def _run_if_known(self) -> FlowRun | None:
        """The flow run; None where there is no telling."""
        try:
            return self._flow_run()
        except (httpx.HTTPError, PrefectException):
            return None

    def _is_anothers(self, run: FlowRun) -> bool:
        """Whether another process runs it by now. Prefect counts how often it has been started."""
        if self._attempt is None:
            self._attempt = run.run_count
        return run.run_count != self._attempt

    def _left_alone(self, why: str) -> BaseException:
        """What leaves the flow run in the state that it has."""
        return Stopped(why) if self._is_subflow else Abort(why)

    def _take_signals(self) -> None:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):  # not Python's, or nobody's
                self._before[number] = before
                signal.signal(number, self._signalled)

    def _give_signals_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
