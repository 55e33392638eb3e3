"""Stop requests: the first one counts, and the grace period ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from trial_core.schedule.stop_requests import StopHandler

WAIT_SECONDS = 20.0


class Subscriber:
    """Records its notifications in order."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()

    def stop(self) -> None:
        self._events.put("stop")

    def expired(self) -> None:
        self._events.put("expired")

    def next(self) -> str:
        return self._events.get(timeout=WAIT_SECONDS)

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


@pytest.fixture
def started() -> Iterator[Callable[[float], StopHandler]]:
    running: list[StopHandler] = []

    def start(grace_seconds: float) -> StopHandler:
        running.append(StopHandler(grace_seconds).__enter__())
        return running[-1]

    yield start
    for each in running:
        each.__exit__(None, None, None)


def test_without_a_request_there_is_no_deadline(started: Callable[[float], StopHandler]) -> None:
    """`wait` returns False."""
    stopping = started(10)
    assert (stopping.request, stopping.has_expired, stopping.seconds_left) == (None, False, None)
    assert not stopping.wait(0)


def test_the_first_request_counts(started: Callable[[float], StopHandler]) -> None:
    """Later requests change neither the reason nor the deadline; each event is reported once."""
    stopping, subscriber = started(60), Subscriber()
    with stopping.subscribed(subscriber.stop, subscriber.expired):
        stopping.ask("cancelled", "in Prefect")
        stopping.ask("time budget")
        assert subscriber.next() == "stop"
        stopping.kill_now()
        assert subscriber.next() == "expired"
        stopping.kill_now()
    assert str(stopping.request) == "cancelled (in Prefect)"
    assert stopping.wait(0)
    assert subscriber.is_empty


def test_the_grace_period_ends(started: Callable[[float], StopHandler]) -> None:
    """Then the subscriber is told to kill the ranks."""
    stopping, subscriber = started(0.05), Subscriber()
    with stopping.subscribed(subscriber.stop, subscriber.expired):
        stopping.ask("preempted", "SIGTERM")
        assert [subscriber.next(), subscriber.next()] == ["stop", "expired"]
    assert stopping.has_expired
    assert stopping.seconds_left == 0


def test_an_urgent_request_has_a_deadline(started: Callable[[float], StopHandler]) -> None:
    """`seconds_left` is at most the grace period."""
    stopping = started(60)
    stopping.ask("preempted")
    assert stopping.wait(WAIT_SECONDS)
    assert stopping.seconds_left is not None
    assert 0 < stopping.seconds_left <= 60


def test_a_late_subscriber_is_notified(started: Callable[[float], StopHandler]) -> None:
    """Of a request, and of the end of the grace period."""
    stopping, first, second = started(60), Subscriber(), Subscriber()
    stopping.ask("suspended")
    assert stopping.wait(WAIT_SECONDS)
    with stopping.subscribed(first.stop, first.expired):
        assert first.next() == "stop"
        stopping.kill_now()
        assert first.next() == "expired"
    with stopping.subscribed(second.stop, second.expired):
        assert [second.next(), second.next()] == ["stop", "expired"]


def test_a_subscriber_is_not_notified_after_its_block(
    started: Callable[[float], StopHandler],
) -> None:
    """A later request does not reach it."""
    stopping, subscriber = started(60), Subscriber()
    with stopping.subscribed(subscriber.stop, subscriber.expired):
        pass
    stopping.ask("cancelled")
    assert stopping.wait(WAIT_SECONDS)
    assert subscriber.is_empty


def test_a_person_replaces_a_signal(started: Callable[[float], StopHandler]) -> None:
    """A Cancel may arrive as SIGTERM: the run stops at once, and then names the Cancel.

    The end of the run waits until it is known who asked.
    """
    stopping, subscriber = started(60), Subscriber()
    with stopping.subscribed(subscriber.stop, subscriber.expired):
        stopping.ask("preempted", "SIGTERM", is_clear=False)
        assert subscriber.next() == "stop"
        assert str(stopping.request) == "preempted (SIGTERM)"
        stopping.ask("server lost")
        stopping.ask("cancelled", "in Prefect")
        stopping.clarified()
        assert str(stopping.final_request()) == "cancelled (in Prefect)"
        assert subscriber.is_empty


def test_a_signal_that_nobody_explains(
    started: Callable[[float], StopHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may not answer: the end of the run waits for a limited time."""
    monkeypatch.setattr("trial_core.schedule.stop_requests.CLARIFY_SECONDS", 0.01)
    stopping = started(60)
    stopping.ask("preempted", "SIGTERM", is_clear=False)
    assert stopping.wait(WAIT_SECONDS)
    assert str(stopping.final_request()) == "preempted (SIGTERM)"


def test_the_end_of_a_run_does_not_wait_after_the_grace_period(
    started: Callable[[float], StopHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker kills it a few seconds later."""
    stopping = started(0)
    stopping.ask("preempted", "SIGTERM", is_clear=False)
    assert stopping.wait(WAIT_SECONDS)
    waits: list[float] = []
    monkeypatch.setattr(stopping._is_clear, "wait", waits.append)
    stopping.final_request()
    assert waits == [0.0]


def test_the_end_of_a_run_waits_once(
    started: Callable[[float], StopHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retraining asks four times, and its worker kills it after 30 s."""
    monkeypatch.setattr("trial_core.schedule.stop_requests.CLARIFY_SECONDS", 0.01)
    stopping = started(60)
    stopping.ask("preempted", "SIGTERM", is_clear=False)
    assert stopping.wait(WAIT_SECONDS)
    stopping.final_request()
    monkeypatch.setattr("trial_core.schedule.stop_requests.CLARIFY_SECONDS", 600.0)
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: answers.put(str(stopping.final_request())))
    asking.daemon = True
    asking.start()
    assert answers.get(timeout=WAIT_SECONDS) == "preempted (SIGTERM)"
