"""Asking a run to stop: who asks first counts, and the grace ends."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from trial_core.run.stop_request import StopHandler

WAIT = 20.0


class Heard:
    """A listener that tells, in order, what it was told."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def stop(self) -> None:
        self._told.put("stop")

    def end(self) -> None:
        self._told.put("end")

    def next(self) -> str:
        return self._told.get(timeout=WAIT)

    @property
    def is_quiet(self) -> bool:
        return self._told.empty()


@pytest.fixture
def started() -> Iterator[Callable[[float], StopHandler]]:
    running: list[StopHandler] = []

    def start(grace_seconds: float) -> StopHandler:
        running.append(StopHandler(grace_seconds).__enter__())
        return running[-1]

    yield start
    for each in running:
        each.__exit__(None, None, None)


def test_nobody_has_asked(started: Callable[[float], StopHandler]) -> None:
    """A run that nobody has asked has all the time there is."""
    stopping = started(10)
    assert (stopping.request, stopping.has_expired, stopping.seconds_left) == (None, False, None)
    assert not stopping.wait(0)


def test_the_first_request_counts(started: Callable[[float], StopHandler]) -> None:
    """Who asks later changes neither the reason nor the deadline."""
    stopping, heard = started(60), Heard()
    with stopping.subscribed(heard.stop, heard.end):
        stopping.ask("cancelled", "in Prefect")
        stopping.ask("time budget")
        assert heard.next() == "stop"
        stopping.kill_now()
        assert heard.next() == "end"
        stopping.kill_now()
    assert str(stopping.request) == "cancelled (in Prefect)"
    assert stopping.wait(0)
    assert heard.is_quiet


def test_the_grace_ends(started: Callable[[float], StopHandler]) -> None:
    """When the grace is over, the ranks are to be ended as they are."""
    stopping, heard = started(0.05), Heard()
    with stopping.subscribed(heard.stop, heard.end):
        stopping.ask("preempted", "SIGTERM")
        assert [heard.next(), heard.next()] == ["stop", "end"]
    assert stopping.has_expired
    assert stopping.seconds_left == 0


def test_the_grace_is_still_running(started: Callable[[float], StopHandler]) -> None:
    """Until then what is left of it is known."""
    stopping = started(60)
    stopping.ask("preempted")
    assert stopping.wait(WAIT)
    assert stopping.seconds_left is not None
    assert 0 < stopping.seconds_left <= 60


def test_who_comes_later_hears_of_it(started: Callable[[float], StopHandler]) -> None:
    """A listener that begins after the request, or after the end, is told at once."""
    stopping, first, second = started(60), Heard(), Heard()
    stopping.ask("suspended")
    assert stopping.wait(WAIT)
    with stopping.subscribed(first.stop, first.end):
        assert first.next() == "stop"
        stopping.kill_now()
        assert first.next() == "end"
    with stopping.subscribed(second.stop, second.end):
        assert [second.next(), second.next()] == ["stop", "end"]


def test_who_has_left_hears_nothing(started: Callable[[float], StopHandler]) -> None:
    """A listener is not called after its block."""
    stopping, heard = started(60), Heard()
    with stopping.subscribed(heard.stop, heard.end):
        pass
    stopping.ask("cancelled")
    assert stopping.wait(WAIT)
    assert heard.is_quiet
