"""The signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from trial_core.run.stop_requests import StopHandler
from trialflow.flows.lifecycle.stop_signals import StopSignals

TIMEOUT_SECONDS = 30.0


@pytest.fixture
def hangup() -> Iterator[None]:
    """The handler of SIGHUP is restored afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(("handler", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_asks_the_run_to_stop(handler: Any, stops: bool) -> None:
    """Not under nohup, which has the signal ignored."""
    signal.signal(signal.SIGHUP, handler)
    with StopHandler(grace_seconds=60) as stopping:
        signals = StopSignals(stopping, has_queue=False, wake=lambda: None)
        signals.install()
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            signals.restore()
        assert signals.received == (signal.SIGHUP if stops else None)
        assert not stops or stopping.wait(TIMEOUT_SECONDS)
        assert (stopping.request is not None) == stops
