"""One retraining of a model at a time, on one Prefect server.

A global concurrency limit of Prefect's with one place decides who comes first. A place can be
forgotten (by a server that was restarted), and given back twice (by name, and when a dead run's
lease ends), so each run that has one also says so in a label of its own, again and again, and then
looks for others that do: of two that both said so, the later one sees the other.

What it is good for is that no GPU trains what somebody else trains already; that only one of two
moves the champion is the registry's work.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from threading import Event, Thread
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectException
from prefect.logging import get_run_logger

from trial_core.errors import TrialflowError
from trialflow.flows.lifecycle.leases import concurrency_slots
from trialflow.flows.lifecycle.requeue import requeue_if_stopped

FLOW = "retrain"
LEASE_LABEL = "trialflow.retrain-lease"
MODEL_LABEL = "trialflow.retrains"
# When the run last said that it has the place: ISO 8601; empty: it has none.
BEAT_LABEL = "trialflow.retrains-at"
BEAT_SECONDS = 20.0
# A run that has not said so for this long is dead, whatever Prefect shows: nobody tells it of a
# run that was started by hand and killed.
SILENCE = timedelta(minutes=3)
# Longer than it takes from having a place to saying so.
SAYING_SECONDS = 5.0
LOOK_SECONDS = 0.5
WAIT_SECONDS = 5.0
JOIN_SECONDS = 5.0
_ALIVE = [StateType.RUNNING, StateType.CANCELLING]


class Overlapping(TrialflowError):
    """Another run retrains the model."""


def limit_of(model: str) -> str:
    """The name of the concurrency limit of a model's retrainings."""
    return f"trialflow-retrain-{model}"


@contextmanager
def alone(model: str, waits: bool) -> Iterator[None]:
    """Be the only one who retrains `model`, for the length of the block.

    Where the server never takes a place back from a run that was killed, as the one that lives for
    a single run, there is nobody to wait for.

    Args:
        waits: whether to wait for another run's end.

    Raises:
        Overlapping: another run does, and this one does not wait.
    """
    with ExitStack() as taken:
        with get_client(sync_client=True) as client:
            is_counted = _takes_places_back(client)
        if is_counted:
            _say(model, has_place=False)  # an attempt that was killed has said that it has one
            with requeue_if_stopped("another retraining"):
                _take(taken, model, waits)
        yield


def _take(taken: ExitStack, model: str, waits: bool) -> None:
    """Get the place, to be given back by `taken`."""
    nobodys: tuple[UUID, float] | None = None  # the limit whose place nobody has, and since when
    is_told = False
    while True:
        with get_client(sync_client=True) as client:
            limit, others = _limit(client, limit_of(model)), _others(client, model)
            if others or limit is None or not _is_full(limit):
                nobodys = None
            elif nobodys is None or nobodys[0] != limit.id:
                nobodys = (limit.id, time.monotonic())
            elif time.monotonic() - nobodys[1] > SAYING_SECONDS:
                _replace(client, limit)
                continue
        if others:
            whose = ", ".join(run.name for run in others)
            if not waits:
                raise Overlapping(f"model {model} is being retrained by {whose} already")
            if not is_told:
                get_run_logger().info("waiting for %s, which retrains model %s", whose, model)
                is_told = True
        elif limit is not None and not _is_full(limit) and _has_taken(taken, model):
            return
        time.sleep(WAIT_SECONDS if others else LOOK_SECONDS)


def _is_full(limit: GlobalConcurrencyLimitResponse) -> bool:
    return limit.active and limit.active_slots >= limit.limit


def _has_taken(taken: ExitStack, model: str) -> bool:
    """Take the place if it is free, and keep it if no other run says that it has it."""
    with ExitStack() as place:
        try:
            place.enter_context(
                concurrency_slots(limit_of(model), 1, LEASE_LABEL, max_retries=0, is_strict=True)
            )
        except ConcurrencySlotAcquisitionError as error:
            cause = error.__cause__
            is_missing = cause is None  # replaced, or deleted by a person, a moment ago
            if is_missing or (
                isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == 423
            ):
                return False
            raise
        place.enter_context(_saying(model))
        with get_client(sync_client=True) as client:
            if _others(client, model):
                return False
        taken.enter_context(place.pop_all())
    return True


@contextmanager
def _saying(model: str) -> Iterator[None]:
    """Say that this run has the place, for the length of the block."""
    ended = Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            try:
                _say(model, has_place=True)
            except (httpx.HTTPError, PrefectException) as error:
                get_run_logger().debug(
                    "nobody was told that model %s is retrained: %s", model, error
                )

    _say(model, has_place=True)
    # With the settings and the logger of this run.
    thread = Thread(
        target=contextvars.copy_context().run, args=(beat,), name="retrains", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_SECONDS)
        try:
            _say(model, has_place=False)
        except (httpx.HTTPError, PrefectException) as error:
            get_run_logger().warning("others may wait for this run after its end: %s", error)


def _say(model: str, has_place: bool) -> None:
    now = datetime.now(timezone.utc).isoformat()
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(
            _this_run(), {MODEL_LABEL: model, BEAT_LABEL: now if has_place else ""}
        )


def _others(client: SyncPrefectClient, model: str) -> list[FlowRun]:
    """Other runs that retrain the model."""
    alive = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ALIVE))
        ),
    )
    return [
        run
        for run in alive
        if run.id != _this_run() and run.labels.get(MODEL_LABEL) == model and _has_said_so(run)
    ]


def _has_said_so(run: FlowRun) -> bool:
    """Whether a run has said lately that it has the place."""
    said_at = str(run.labels.get(BEAT_LABEL, ""))
    return said_at != "" and datetime.now(timezone.utc) - datetime.fromisoformat(said_at) < SILENCE


def _limit(client: SyncPrefectClient, name: str) -> GlobalConcurrencyLimitResponse | None:
    """The limit, made if it is missing; None: somebody else is making or deleting it."""
    try:
        return client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        _make(client, name, 1)
    try:
        return client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        return None


def _make(client: SyncPrefectClient, name: str, places: int) -> None:
    try:
        client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name=name, limit=places, active=True)
        )
    except ObjectAlreadyExists:
        return  # another run has just made it


def _replace(client: SyncPrefectClient, limit: GlobalConcurrencyLimitResponse) -> None:
    """Put a new limit in the place of one that counts what nobody has.

    By its id, not by name: of two that do so, one succeeds, and neither deletes what is new. The
    lease of a dead run may still end, and give its place of the old one back: that is nobody's.
    """
    get_run_logger().warning(
        "the place of %s is taken, and no run has it: a crashed run has left it, or the server has "
        "forgotten whose it was; the limit is made anew", limit.name,
    )  # fmt: skip
    try:
        client.delete_global_concurrency_limit_by_name(str(limit.id))
    except ObjectNotFound:
        return
    _make(client, limit.name, limit.limit)


def _takes_places_back(client: SyncPrefectClient) -> bool:
    """Whether the server ends leases that are not renewed. One that does not say, does."""
    try:
        settings = client.request("GET", "/admin/settings").json()
        return bool(settings["server"]["services"]["repossessor"]["enabled"])
    except (httpx.HTTPError, KeyError, ValueError):
        return True


def _this_run() -> UUID:
    return UUID(str(runtime.flow_run.id))
