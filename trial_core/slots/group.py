"""The slot group: all the ranks of a trial, launched once and kept warm for the whole run.

Every rank's process is watched, and its connection, so waiting for an answer needs no timeout to
notice a death. When a rank fails the group is over: the others are killed (they may be inside a
collective that can never complete) and everything that waits raises `RankFailed` with the first
cause. Ranks that hang are found by their silence, and their stacks logged before they are killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from trial_core.errors import (
    LaunchError,
    RankFailed,
    SlotsError,
    Stopped,
)
from trial_core.messages import (
    AnyRequest,
    BatchesTrained,
    BatchesValidated,
    BuildTrial,
    Envelope,
    FromRank,
    LogLines,
    PauseSteps,
    Peer,
    Result,
    ResumeUntil,
    Shutdown,
    StepsPaused,
    StopRequested,
)
from trial_core.slots.channel import Channel
from trial_core.slots.launcher import RankProcess, launch_ranks
from trial_core.slots.pending import Pending, PendingRequests
from trial_core.slots.progress_monitor import ProgressMonitor
from trial_core.slots.rank_failures import Failures, FirstCause, exit_status
from trial_core.slots.stop_barrier import Position, StopCoordinator

logger = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
SHUTDOWN_SECONDS = 10.0
KILL_SECONDS = 30.0
# How long a rank may live on once its connection has ended.
LEFT_SECONDS = 5.0
# While ranks start, how often to ask whether they are still wanted.
LOOK_SECONDS = 0.2

R = TypeVar("R", bound=Result)


class SlotGroup:
    """The driver's handle on a trial's ranks. A context manager: leaving it leaves no process.

    Args:
        world_size: ranks to start on this machine.
        working_dir: where the ranks run (the folder of the user's code).
        log_dir: where ``rank-N.log`` files go.
        environment: the experiment's environment variables.
        on_batches: told how far training has come, a few times a second.
        on_log: told new lines of a rank's log, rate-capped by the rank.
        should_abort: asked while the ranks start whether to give up.

    The first two callbacks run in the channel's thread and must return at once.

    Raises:
        LaunchError: they do not start, or do not join.
        RankFailed: one of them died while starting.
        Stopped: they were no longer wanted.
    """

    def __init__(
        self,
        world_size: int,
        *,
        working_dir: Path,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        on_batches: Callable[[int], None] = lambda batches: None,
        on_log: Callable[[int, str], None] = lambda rank, line: None,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world_size = world_size
        self._on_batches = on_batches
        self._on_log = on_log
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._joined_or_failed = threading.Event()
        self._pending = PendingRequests(world_size)
        self._closing = False
        self._stopping = False
        self._failure: SlotsError | None = None
        self._causes = FirstCause(world_size, self._settle_on)
        self._own_log_dir = log_dir is None
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="trialflow-logs-"))
        self._channel = Channel(world_size, self)
        self._stop_coordinator = StopCoordinator(
            world_size,
            pause=lambda: self._channel.send(PauseSteps()),
            resume_until=lambda at: self._channel.send(
                ResumeUntil(workload=at.workload, steps=at.steps)
            ),
        )
        self._ranks: list[RankProcess] = []
        self._signs = ProgressMonitor(self._ranks)
        self._failures = Failures(self._ranks, self._peers, self._pending, self.log_dir)
        try:
            launch_ranks(
                world_size,
                address=self._channel.address,
                secret=self._channel.secret,
                log_dir=self.log_dir,
                working_dir=working_dir,
                environment=environment or {},
                on_exit=self._rank_exited,
                ranks=self._ranks,
            )
            self._wait_until_joined(JOIN_SECONDS, should_abort)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> SlotGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, by rank."""
        return [rank.pid for rank in self._ranks]

    # ---------------------------------------------------------------------------- requests

    def submit(self, request: AnyRequest) -> Future[list[Result]]:
        """Send `request` to every rank; the future holds all results, in the order of ranks.

        Raises (the future): RankFailed when a rank dies or its workload raises.
        """
        return self._submit(request).future

    def request(
        self,
        request: AnyRequest,
        expect: type[R],
        timeout_seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> list[R]:
        """Send `request` to every rank and wait for all results, in the order of ranks.

        Args:
            expect: the type of result that this request leads to.
            timeout_seconds: a deadline; None where the workload's length is the user's business.
            stall_seconds: how long there may be no sign that ranks get on (see
                `trial_core.slots.progress_monitor`); None: for ever.

        Raises:
            RankFailed: a rank died, or its workload raised.
            Stalled: there was none for too long; the group is killed.
            Stopped: the run was to end as it is; the group is killed.
            DeadlineExceeded: ranks are alive but silent; the group is killed.
        """
        pending = self._submit(request)
        results = self._wait_for(pending, timeout_seconds, stall_seconds)
        typed = [result for result in results if isinstance(result, expect)]
        if len(typed) != len(results):
            raise SlotsError(f"{pending.name} was answered by something else: {results!r}")
        return typed

    def _submit(self, request: AnyRequest) -> Pending:
        pending = self._pending.add(request)
        with self._lock:
            failure = self._failure or (_closed() if self._closing else None)
            if isinstance(request, BuildTrial):
                self._stopping = False
            if failure is None:
                self._signs.note()
                self._channel.send(Envelope(number=pending.number, request=request))
        if failure is not None:
            self._pending.fail_one(pending, failure)
        return pending

    def _wait_for(
        self, pending: Pending, timeout_seconds: float | None, stall_seconds: float | None
    ) -> list[Result]:
        began = time.monotonic()
        while True:
            now = time.monotonic()
            patience = [] if timeout_seconds is None else [began + timeout_seconds - now]
            if stall_seconds is not None:
                patience.append(self._signs.look_again_seconds(pending.request, stall_seconds))
            try:
                return pending.future.result(max(0.0, min(patience)) if patience else None)
            except FutureTimeout:
                now = time.monotonic()
            if timeout_seconds is not None and now >= began + timeout_seconds:
                raise self._end_with(self._failures.late(pending, timeout_seconds))
            if (
                stall_seconds is not None
                and self._signs.silence_seconds(pending.request) >= stall_seconds
            ):
                raise self._end_with(self._failures.stalled(pending, stall_seconds))

    # ------------------------------------------------------------------------------- stopping

    def stop(self) -> None:
        """Have the training or validation under way end early, after a batch that the ranks agree
        on, and those that follow before their first, until another trial is built. Everything else
        is carried out as ever."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._stop_coordinator.start()

    def abort(self, why: str) -> None:
        """End the ranks as they are; whoever waits for them raises `Stopped`."""
        self._end_with(Stopped(why))

    # ------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End the ranks in good order if they are idle, at once otherwise. Leaves no process."""
        try:
            self._end_in_good_order()
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL every rank with all that it has started, and fail whatever waits."""
        self._closing = True
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            if not rank.wait(KILL_SECONDS):
                logger.error("rank %d (process %d) does not end", rank.rank, rank.pid)
        self._pending.fail(self._failure or _closed())
        self._channel.close()
        if self._own_log_dir:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _end_in_good_order(self) -> None:
        with self._lock:
            if self._closing or self._pending or self._failure is not None:
                return
        ended = self.submit(Shutdown())
        self._closing = True  # from here on a rank that leaves is no failure
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        try:
            ended.result(SHUTDOWN_SECONDS)
        except (SlotsError, FutureTimeout) as error:
            logger.warning("ranks did not shut down by themselves: %s", error or "no answer")
            return
        for rank in self._ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------ what the channel's thread tells

    def rank_joined(self, peer: Peer) -> None:
        """Part of the channel's `Listener`."""
        self._peers[peer.rank] = peer
        if len(self._peers) == self.world_size:
            self._joined_or_failed.set()

    def rank_said(self, rank: int, message: FromRank) -> None:
        """Part of the channel's `Listener`."""
        if isinstance(message, BatchesTrained):
            self._signs.note()
            self._on_batches(message.batches)
        elif isinstance(message, BatchesValidated):
            self._signs.note()
        elif isinstance(message, StepsPaused):
            self._stop_coordinator.rank_paused(rank, Position(message.workload, message.steps))
        elif isinstance(message, StopRequested):
            self.stop()
        elif isinstance(message, LogLines):
            for line in message.lines:
                self._on_log(rank, line)
        elif message.error is not None:
            self._causes.note(self._failures.raised(rank, message))
        elif message.result is not None:
            self._pending.note(rank, message.number, message.result)

    def rank_left(self, rank: int, why: str | None) -> None:
        """Part of the channel's `Listener`."""
        if self._closing:
            return
        if why is not None:
            self._causes.note(
                self._failures.failed(rank, error_type="ProtocolError", error_message=why)
            )
        else:
            # Most often it has died, which its watcher tells, with the signal. If it has not:
            late = threading.Timer(
                LEFT_SECONDS, lambda: self._causes.note(self._failures.failed(rank))
            )
            late.daemon = True
            late.start()

    # ------------------------------------------------------------ what a rank's watcher tells

    def _rank_exited(self, rank: int, code: int) -> None:
        if self._closing:
            return
        exit_code, signal_name = exit_status(code)
        self._note(rank, exit_code=exit_code, signal_name=signal_name)

    # ---------------------------------------------------------------------------- internals

    def _note(self, rank: int, **how: Any) -> None:
        self._causes.note(self._failures.failed(rank, **how))

    def _wait_until_joined(self, timeout_seconds: float, should_abort: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._joined_or_failed.wait(LOOK_SECONDS) and time.monotonic() < deadline:
            if should_abort():
                raise Stopped("the run was stopped while its ranks were starting")
        if self._failure is not None:
            raise self._failure
        missing = sorted(set(range(self.world_size)) - set(self._peers))
        if missing:
            raise LaunchError(
                f"rank {', '.join(map(str, missing))} did not join within "
                f"{timeout_seconds:g} s; see the logs in {self.log_dir}"
            )

    def _end_with(self, failure: SlotsError) -> SlotsError:
        """The group is over. What it is over with: the first failure of all."""
        with self._lock:
            if self._closing or self._failure is not None:
                return self._failure or failure
            self._failure = failure
        for rank in self._ranks:
            rank.kill()
        self._joined_or_failed.set()
        self._pending.fail(failure)
        return failure

    def _settle_on(self, cause: RankFailed) -> None:
        self._end_with(cause)


def _closed() -> SlotsError:
    return SlotsError(f"the slot group was closed (by process {os.getpid()})")
