"""SIGTERM to a rank under torchrun, wherever the rank's main thread is, and whatever others do."""

from __future__ import annotations

import os
import queue
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from trial_core.slots.stop_barrier import LAST_STEP, Position, StopBarrier
from trial_core.trainer import fit_stop
from trial_core.trainer.fit_stop import FitStop

WAIT_SECONDS = 30.0


class WatchedBarrier(StopBarrier):
    """Tells the test what the rank's thread does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = threading.Event()
        self.ends: queue.SimpleQueue[Position] = queue.SimpleQueue()

    def pause(self) -> Position:
        position = super().pause()
        self.paused.set()
        return position

    def resume_until(self, end: Position) -> None:
        super().resume_until(end)
        self.ends.put(end)


@pytest.fixture
def barrier() -> WatchedBarrier:
    return WatchedBarrier()


def rank_of(size: int) -> Any:
    """The part of a `DistributedContext` that is used. Rank 0."""
    return SimpleNamespace(get_size=lambda: size, get_rank=lambda: 0, broadcast=lambda key: "key")


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    """Why ranks were to end; they do not."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(fit_stop, "end_rank", reasons.put)
    monkeypatch.setattr(fit_stop, "ANSWER_SECONDS", 0.05)
    return reasons


def test_sigterm_is_noticed_while_the_main_thread_is_in_c(barrier: WatchedBarrier) -> None:
    """A rank waits for its accelerator there, and runs no handler in Python."""
    handlers_run: list[int] = []
    with FitStop(rank_of(1), barrier):
        # The handler of Python does not matter, as if it had not been run yet.
        signal.signal(signal.SIGTERM, lambda number, frame: handlers_run.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        assert barrier.paused.wait(WAIT_SECONDS)
    assert handlers_run == [signal.SIGTERM]


def test_signals_are_handled_as_before_after_the_block(barrier: WatchedBarrier) -> None:
    """SIGTERM ends the script again, and an event loop gets its signals."""
    loop = os.pipe()
    os.set_blocking(loop[1], False)
    before = signal.set_wakeup_fd(loop[1])
    try:
        with FitStop(rank_of(1), barrier):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.set_wakeup_fd(before) == loop[1]
    finally:
        signal.set_wakeup_fd(before)
        for end in loop:
            os.close(end)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_signal_of_a_forked_process_is_its_own(barrier: WatchedBarrier) -> None:
    """It shares the rank's descriptors, but must not stop the rank; and SIGTERM ends it."""
    with FitStop(rank_of(1), barrier):
        child = os.fork()
        if child == 0:
            is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os._exit(0 if is_default and signal.set_wakeup_fd(-1) == -1 else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_ends_if_another_does_not_answer(
    barrier: WatchedBarrier,
    reasons: queue.SimpleQueue[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
) -> None:
    """Rank 1 has died, and NCCL would wait for it: only torchrun's SIGKILL would end rank 0."""
    store = HashStore()
    monkeypatch.setattr(fit_stop, "_separate_store", lambda: store)
    if answers:
        store.set("trialflow/terminated/key/1", "0 7")
    with FitStop(rank_of(2), barrier):
        os.kill(os.getpid(), signal.SIGTERM)
        if answers:
            assert barrier.ends.get(timeout=WAIT_SECONDS) == Position(0, 7)
        else:
            reason = reasons.get(timeout=WAIT_SECONDS)
            assert reason == "rank 1 has not answered within 0.05 s: it has died or hangs"
    assert reasons.empty()


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_rank_without_a_store_ends_if_it_is_asked_to(
    barrier: WatchedBarrier,
    reasons: queue.SimpleQueue[str],
    monkeypatch: pytest.MonkeyPatch,
    is_asked: bool,
) -> None:
    """Rank 0 has died. Before a signal, the rank's next collective may raise the actual error."""

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(fit_stop, "_separate_store", Gone)
    with FitStop(rank_of(2), barrier):
        assert barrier.ends.get(timeout=WAIT_SECONDS) == Position(LAST_STEP, LAST_STEP)
        if is_asked:
            os.kill(os.getpid(), signal.SIGTERM)
            assert reasons.get(timeout=WAIT_SECONDS).startswith("rank 0, which hosts the ranks'")
        else:
            with pytest.raises(queue.Empty):
                reasons.get(timeout=0.2)


def test_a_rank_ends_with_the_code_of_sigterm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says why."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    fit_stop.end_rank("rank 1 has died")
    assert codes == [143]
    assert "ends without a checkpoint: rank 1 has died" in caplog.text
