"""The signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.prefect import ROOT
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle import stop_signals
from trialflow.flows.lifecycle.stop_signals import StopSignals, signals_in_thread

TIMEOUT_SECONDS = 30.0


@pytest.fixture
def hangup() -> Iterator[None]:
    """The handler of SIGHUP is restored afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(
    ("handler", "has_queue", "reason"),
    [
        (signal.SIG_DFL, False, "interrupted"),
        (signal.SIG_DFL, True, "preempted"),
        (signal.SIG_IGN, False, None),
    ],
)
def test_a_closed_terminal_asks_the_run_to_stop(
    handler: Any, has_queue: bool, reason: str | None
) -> None:
    """Not under nohup, which has the signal ignored. A run of a queue goes back into it."""
    stops, woken = reason is not None, list[bool]()
    signal.signal(signal.SIGHUP, handler)
    with StopHandler(grace_seconds=60) as stopping:
        signals = StopSignals(stopping, has_queue, wake=lambda: woken.append(True))
        signals.install()
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            signals.restore()
        assert signals.received == (signal.SIGHUP if stops else None)
        assert not stops or stopping.wait(TIMEOUT_SECONDS)
        assert (stopping.request and stopping.request.reason) == reason
        assert woken == [True] * stops


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(("same_seconds", "is_second"), [(0.0, True), (600.0, False)])
def test_a_second_signal_ends_the_grace_period(
    monkeypatch: pytest.MonkeyPatch, same_seconds: float, is_second: bool
) -> None:
    """Not one that arrives twice. A third one is the previous handler's."""
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_SECONDS", same_seconds)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    expired = threading.Event()
    with StopHandler(grace_seconds=600) as stopping:
        signals = StopSignals(stopping, has_queue=False, wake=lambda: None)
        signals.install()
        try:
            with stopping.subscribed(lambda: None, expired.set):
                os.kill(os.getpid(), signal.SIGHUP)
                os.kill(os.getpid(), signal.SIGHUP)
                assert not is_second or expired.wait(TIMEOUT_SECONDS)
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_DFL) == is_second
        finally:
            signals.restore()
    assert stopping.has_expired == is_second  # its thread has ended


@pytest.fixture
def handled() -> Iterator[None]:
    """The main thread has a handler of SIGTERM, and ignores Ctrl-C, as in a shell's background."""
    handlers = {signal.SIGTERM: lambda number, frame: None, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handled")
def test_a_run_in_another_thread_is_asked_until_it_ends() -> None:
    """Its signals are then only for the others."""
    with StopHandler(grace_seconds=60) as stopping, ThreadPoolExecutor() as threads:
        ended, runs = [
            threads.submit(StopSignals, stopping, False, lambda: None).result() for _ in range(2)
        ]
        for each in (ended, runs):
            threads.submit(each.install).result()
        ended.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(TIMEOUT_SECONDS)
        runs.restore()
    assert (ended.received, runs.received) == (None, signal.SIGTERM)


@pytest.mark.usefixtures("handled")
def test_an_ignored_signal_asks_no_run_in_another_thread() -> None:
    """Python would do nothing either."""
    before = {*threading.enumerate()}
    with signals_in_thread(lambda number: None):
        listening = {*threading.enumerate()} - before
    assert [each.name for each in listening] == ["signals SIGTERM"]


PROGRAM = """
import os, signal, threading
from trialflow.flows.lifecycle.stop_signals import signals_in_thread

def train():
    with signals_in_thread(told.append):
        is_training.set()
        assert may_end.wait(30)

told, is_training, may_end = [], threading.Event(), threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: None)
thread = threading.Thread(target=train)
thread.start()
assert is_training.wait(30)
os.kill(os.getpid(), signal.SIGTERM)
while not told:
    pass
print("told", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as at the end of the main thread's flow
may_end.set()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print("lives on", flush=True)
"""


@pytest.mark.long
def test_a_signal_ends_the_process_once_its_threads_do_not_listen() -> None:
    """Also if the main thread has no handler any more."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, capture_output=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("told\n", -signal.SIGTERM), done.stderr
