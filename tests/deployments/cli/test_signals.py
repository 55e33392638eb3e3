"""Ctrl-C and SIGTERM while a command runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.cli import ROOT
from trialflow.deployments.cli.signals import Terminated, stoppable

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_ends_the_block(number: signal.Signals, expected: type[BaseException]) -> None:
    """The first signal calls the callback and raises."""
    told: list[str] = []
    with pytest.raises(expected), stoppable(told.append):
        os.kill(os.getpid(), number)
    assert told == [NAMES[number]]


ECHOED = """
import os, signal
from trialflow.deployments.cli.signals import stoppable
with stoppable(print):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("tidied up", flush=True)
"""


def test_a_repeated_signal_within_a_second_is_one_request() -> None:
    """Ctrl-C may arrive twice, from terminal and parent: the second does not end the cleanup."""
    done = subprocess.run(
        [sys.executable, "-c", ECHOED], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.stdout == "Ctrl-C\ntidied up\n"


def test_handlers_are_restored() -> None:
    """After the block, the signal handlers are those from before."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stoppable(lambda why: None):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


STUCK = """
import os, signal, sys
from trialflow.deployments.cli import signals
signals.SAME_REQUEST_SECONDS = 0.0
with signals.stoppable(lambda why: print(why, flush=True)):
    try:
        print("running", flush=True)
        signal.pause()
    finally:
        print("tidying up", flush=True)
        while True:
            signal.pause()
"""


@contextmanager
def stuck() -> Iterator[subprocess.Popen[str]]:
    """A program that waits for a signal, and whose cleanup never ends."""
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_a_second_request_ends_at_once() -> None:
    """A second signal ends a command whose cleanup hangs."""
    with stuck() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "Ctrl-C\n"
        assert process.stdout.readline() == "tidying up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
