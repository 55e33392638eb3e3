"""The flow runs that a run is part of: a user's flow may call `train`, and be called itself.

A run's trial belongs to its flow run, so that a retry continues it. Prefect gives a subflow another
flow run in each attempt at its parent. So the trial of a subflow belongs to the parent's flow run
and to the call: the task in which it was made, the experiment's name and hyperparameters, and how
many such calls there were before it. Their order among other calls does not count: calls in several
threads come in any order.

A stop of a parent, by Cancel for example, ends its subflows, which save first (`stop_monitor`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun
from prefect.context import FlowRunContext, TaskRunContext

from trial_core.config import ExperimentConfig
from trial_core.errors import TrialflowError
from trial_core.schedule.stop_requests import StopHandler, StopReason
from trialflow.tasks.client_retries import client_retries

_identities: dict[UUID, str] = {}
"""The results of `_identity`, by the ids of subflow runs."""
_calls: Counter[str] = Counter()
_lock = threading.Lock()
_caller: ContextVar[StopHandler | None] = ContextVar("caller", default=None)


@contextmanager
def stopping_with(caller: StopHandler) -> Iterator[None]:
    """Flow runs that are called inside the block stop when `caller` is asked to, which a server may
    not show: by a signal, or by the time budget."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def stop_handler_of_caller() -> StopHandler | None:
    """The stop handler of the run that called this one; None if it gave none."""
    return _caller.get()


def identity_of_run(config: ExperimentConfig) -> str:
    """Return the identity that this flow run's trial belongs to; all attempts have the same."""
    context, task = FlowRunContext.get(), TaskRunContext.get()
    run = context.flow_run if context else None
    if run is None or not _is_called(run):
        return str(runtime.flow_run.id)
    hyperparameters = json.dumps(config.hyperparameters, sort_keys=True, default=str)
    what = f"{task.task_run.task_key if task else ''}/{config.name}/{hyperparameters}"
    with _lock, get_client(sync_client=True) as client:
        return _identity(client, run, lambda call: what)


def _is_called(run: FlowRun) -> bool:
    """Return whether another run of this process called it. A deployment's run has no caller."""
    return run.parent_task_run_id is not None and run.deployment_id is None


def _identity(client: SyncPrefectClient, run: FlowRun, describe: Callable[[TaskRun], str]) -> str:
    """Return a run's identity: its id, or for a subflow an id of the call that started it.

    Args:
        describe: describes the call, from the task run that stands for it in the parent.
    """
    if run.parent_task_run_id is None or not _is_called(run):
        return str(run.id)
    if run.id not in _identities:
        call, parent = _call(client, run.parent_task_run_id)
        described = f"{_identity(client, parent, partial(_describe, parent))}/{describe(call)}"
        _calls[attempt := f"{described}/{parent.id}/{parent.run_count}"] += 1
        _identities[run.id] = uuid5(NAMESPACE_URL, f"{described}/{_calls[attempt]}").hex
    return _identities[run.id]


def _describe(run: FlowRun, call: TaskRun) -> str:
    """Describe a call of a user's flow. Prefect numbers calls, but not those within tasks."""
    if call.dynamic_key.isdigit():
        return f"{call.task_key}/{call.dynamic_key}"
    return f"{call.task_key}/{json.dumps(run.parameters, sort_keys=True, default=str)}"


def _call(client: SyncPrefectClient, call_id: UUID) -> tuple[TaskRun, FlowRun]:
    """Return the task run that stands for a subflow in its parent, and the parent."""
    call = client.read_task_run(call_id)
    if call.flow_run_id is None:
        raise TrialflowError(f"Prefect does not know whose task {call.name} ({call.id}) is")
    return call, client.read_flow_run(call.flow_run_id)


@dataclass(frozen=True)
class ParentStop:
    """The reason for a subflow to stop, from a run that it is part of.

    Attributes:
        flow_run_id: the id of that run.
        is_superseded: True if another attempt at that run has started, so that nothing is saved.
    """

    flow_run_id: UUID
    reason: StopReason
    detail: str
    is_superseded: bool = False


class ParentRuns:
    """The flow runs that this one is part of.

    Args:
        call: the task run that stands for this run in its parent; None if it has no parent.
    """

    def __init__(self, call: UUID | None) -> None:
        self._call = call
        self._parents: dict[UUID, UUID] = {}
        self._attempts: dict[UUID, int] = {}

    def stop(self) -> ParentStop | None:
        """Return the reason to stop if a parent ends, else None. Raises as Prefect's client."""
        if self._call is None:
            return None
        with client_retries(0), get_client(sync_client=True) as client:
            call: UUID | None = self._call
            while call is not None:
                if call in self._parents:
                    run = client.read_flow_run(self._parents[call])
                else:
                    _, run = _call(client, call)
                    self._parents[call] = run.id
                if (stop := self._stop_of(run)) is not None:
                    return stop
                call = run.parent_task_run_id
        return None

    def _stop_of(self, run: FlowRun) -> ParentStop | None:
        state, named = run.state, f"its parent run {run.name}"
        if run.run_count != self._attempts.setdefault(run.id, run.run_count):
            return ParentStop(run.id, "cancelled", f"another attempt at {named} has started", True)
        if state is None or state.type == StateType.RUNNING:
            return None
        if state.type == StateType.PAUSED:
            return ParentStop(run.id, "suspended", f"with {named}")
        if state.type in (StateType.CANCELLING, StateType.CANCELLED):
            return ParentStop(run.id, "cancelled", f"with {named}")
        return ParentStop(run.id, "cancelled", f"{named} was set to {state.name}")
