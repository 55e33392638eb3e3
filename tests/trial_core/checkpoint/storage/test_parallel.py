from __future__ import annotations

from threading import Barrier, Event

import pytest

from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel


def test_results_are_in_the_order_of_the_items() -> None:
    """Two items are worked on at once; the results keep the items' order."""
    both = Barrier(2)

    def work(item: int, stop: CancelSignal) -> int:
        both.wait(timeout=10)
        return item * 2

    assert in_parallel(work, [3, 1, 4, 1], 2) == [6, 2, 8, 2]


def test_the_first_error_stops_all_other_work() -> None:
    """Running work is asked to stop, further items are not started, the first error is raised."""
    begun = Event()
    ended: list[int] = []

    def work(item: int, stop: CancelSignal) -> None:
        if item == 1:
            begun.wait(timeout=10)
            raise ValueError("the cause")
        begun.set()
        try:
            while True:
                stop.check()
        finally:
            ended.append(item)

    with pytest.raises(ValueError, match="the cause"):
        in_parallel(work, [0, 1, 2, 3], 2)
    assert 0 in ended
    assert 3 not in ended


def test_a_failure_stops_what_other_work_does_in_parallel() -> None:
    """The signal of the outer work cancels the inner work; the first error is raised."""
    begun = Event()

    def inner(item: int, stop: CancelSignal) -> None:
        begun.set()
        while True:
            stop.check()

    def outer(item: int, stop: CancelSignal) -> None:
        if item == 0:
            in_parallel(inner, [0, 1], 2, stop)
        begun.wait(timeout=10)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        in_parallel(outer, [0, 1], 2)
