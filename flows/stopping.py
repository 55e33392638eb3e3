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
from types import FrameType, TracebackType
from typing import Any
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, Pause, PrefectException
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Cancelled

from trial_core.observer import current_observer
from trial_core.stopping import Stopping, Why

LOOK_SECONDS = 5.0
# One Ctrl-C may arrive twice: from the terminal, and from a parent that hands it on.
SAME_REQUEST_SECONDS = 1.0

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_IS_TO_CANCEL = (StateType.CANCELLING, StateType.CANCELLED)
_IS_OVER = (StateType.CRASHED, StateType.FAILED, StateType.COMPLETED)


class StopWatch:
    """For the length of the block, has signals, the flow run's state and the time budget ask
    `stopping`. A second signal asks for an end at once.

    Args:
        time_budget_seconds: None: no limit.
    """

    def __init__(self, stopping: Stopping, time_budget_seconds: float | None) -> None:
        self._stopping = stopping
        self._budget = time_budget_seconds
        self._flow_run_id = UUID(str(runtime.flow_run.id))
        self._logger = get_run_logger()
        self._before: dict[int, Any] = {}
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._is_over = threading.Event()
        # Prefect's settings, and the way to its server, are those of this context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: context.run(self._watch), name="stop-watch", daemon=True
        )

    def __enter__(self) -> StopWatch:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._signalled) for each in _SIGNALS}
        _do_not_suspend_in_between()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._give_signals_back()

    def conclude(self) -> State[Any] | None:
        """The run has ended: the state that its flow run gets if it was stopped. None: its own.

        Raises:
            Pause: it was suspended, and stays so until it is resumed.
            Abort: it was preempted, and has been put back into its queue.
            BaseException: what the signal that stopped it would have raised at once.
        """
        asked = self._stopping.asked
        if asked is None or asked.why == "time budget":
            return None
        state = self._state()
        if state is not None and state.type in _IS_TO_CANCEL:
            return Cancelled(message=f"Stopped: {asked}")
        if state is not None and state.type == StateType.PAUSED:
            raise Pause(f"suspended: {asked}", state=state)
        if state is not None and state.type == StateType.RUNNING and runtime.deployment.id:
            self._put_back()
            raise Abort(f"{asked}: scheduled again")
        if self._signal is not None:
            self._give_signals_back()
            signal.raise_signal(self._signal)
        return None

    # ----------------------------------------------------------------------- who asks

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled_at = number, now
            why: Why = "preempted" if runtime.deployment.id else "interrupted"
            self._stopping.ask(why, _SIGNALS[signal.Signals(number)])
            current_observer().stopping(_SIGNALS[signal.Signals(number)])
        elif now - self._signalled_at >= SAME_REQUEST_SECONDS:
            self._stopping.at_once()

    def _watch(self) -> None:
        began, has_warned = time.monotonic(), False
        while not self._is_over.wait(LOOK_SECONDS):
            if self._budget is not None and time.monotonic() - began >= self._budget:
                self._stopping.ask("time budget", f"{self._budget:g} s are over")
            try:
                self._look()
            except (httpx.HTTPError, PrefectException) as error:
                if not has_warned:
                    self._logger.warning(
                        "whether this run was cancelled cannot be seen (said once, training goes "
                        "on): %s: %s", type(error).__name__, error,
                    )  # fmt: skip
                has_warned = True

    def _look(self) -> None:
        run = self._flow_run()
        state = None if run is None else run.state
        if run is None:
            self._stopping.ask("cancelled", "its flow run was deleted")
        elif state is not None and state.type in _IS_TO_CANCEL:
            self._stopping.ask("cancelled", "in Prefect")
        elif state is not None and state.type == StateType.PAUSED:
            self._stopping.ask("suspended", "in Prefect")
        elif state is not None and state.type in _IS_OVER:
            self._stopping.ask("cancelled", f"its flow run was declared {state.name}")

    # ------------------------------------------------------------------ how it ends

    def _flow_run(self) -> FlowRun | None:
        with get_client(sync_client=True) as client:
            try:
                return client.read_flow_run(self._flow_run_id)
            except ObjectNotFound:
                return None

    def _state(self) -> State[Any] | None:
        """The flow run's state; None where there is no telling."""
        try:
            run = self._flow_run()
        except (httpx.HTTPError, PrefectException):
            return None
        return None if run is None else run.state

    def _put_back(self) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(
                self._flow_run_id, AwaitingRetry(message=str(self._stopping.asked)), force=True
            )

    def _give_signals_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _do_not_suspend_in_between() -> None:
    """Keep Prefect from ending a suspended run, unsaved, at its next task; `conclude` ends it."""
    # A part of Prefect that has no public face; releases before it had none suspend by state alone.
    request = getattr(FlowRunContext.get(), "flow_run_suspension_request", None)
    if request is not None:
        request.raise_if_requested = lambda: None
