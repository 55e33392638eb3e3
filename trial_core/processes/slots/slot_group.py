"""The slot group: all ranks of a trial, launched once and kept warm for the whole run.

The group watches every rank's process and connection, so it notices a death without a timeout. When
a rank fails, the group kills the other ranks, which may be inside a collective that never
completes. Every pending request raises `RankFailed` with the first cause. If a callback overrides
`on_trial_shutdown`, the ranks first get `SHUTDOWN_SECONDS` to call it. The group compares the time
that the progress clock measures with the stall timeout. Hung ranks log their stacks before they are
killed.

Ranks that another program has started (`joined_launcher`) are not killed with the group: they get
its failure, raise it, and leave. The end of the group does not end their processes.

The route of a stop: see `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from trial_core.errors import LaunchError, RankFailed, SlotsError, Stopped
from trial_core.messages import (
    Abort,
    Activity,
    Answer,
    AnyRequest,
    BatchesTrained,
    BatchesValidated,
    Envelope,
    FromRank,
    Logged,
    LogLines,
    Message,
    PauseSteps,
    Peer,
    ReportTaken,
    Result,
    ResumeUntil,
    ScriptEvent,
    Shutdown,
    StepsPaused,
    StopRequested,
    TrainBatches,
    TrialBuilt,
)
from trial_core.processes.slots.announcer import AnnouncementTimer
from trial_core.processes.slots.channel import Listener
from trial_core.processes.slots.first_cause import FirstCause
from trial_core.processes.slots.group_state import GroupState, Pause
from trial_core.processes.slots.launcher import (
    Launcher,
    LaunchRequest,
    RankConnections,
)
from trial_core.processes.slots.pending_requests import PendingRequest, PendingRequests
from trial_core.processes.slots.rank_handle import RankHandle, wait_for_end
from trial_core.processes.slots.stacks import log_stacks
from trial_core.processes.slots.stall_clock import CHECKS_PER_TIMEOUT, StallClock
from trial_core.processes.slots.stop_barrier import Position, StopCoordinator
from trial_core.schedule.stop_requests import StopReason

logger = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
SHUTDOWN_SECONDS = 10.0
KILL_SECONDS = 30.0
# How often to ask `should_abort` while ranks start.
POLL_SECONDS = 0.2

R = TypeVar("R", bound=Result)


class SlotGroup(Listener, AbstractContextManager["SlotGroup"]):
    """The driver's handle on a trial's ranks. A context manager: no process outlives the block.

    Args:
        working_dir: the folder of the user's code.
        log_dir: the folder of the ``rank-N.log`` files.
        launcher: starts the ranks.
        on_batches: called with the fields of `BatchesTrained`, a few times a second.
        on_log: called with new lines of a rank's log, which the rank rate-limits.
        on_activity: called with rank 0's activity, if that takes long.
        on_script: called with what a Core API script reports.
        on_stop_signal: called when a rank has received a signal to stop; None calls `stop`.
        should_abort: asked while the ranks start; True to give up.

    The functions `on_…` are called in the channel's thread and must return at once.

    Raises:
        LaunchError: a rank does not start, or does not join in time.
        RankFailed: a rank died while starting.
        Stopped: `should_abort` returned True.
    """

    def __init__(
        self,
        world_size: int,
        *,
        working_dir: Path,
        log_dir: Path,
        launcher: Launcher,
        environment: Mapping[str, str] | None = None,
        on_batches: Callable[[int, int], None] = lambda batches, total: None,
        on_log: Callable[[int, str], None] = lambda rank, line: None,
        on_activity: Callable[[str], None] = lambda text: None,
        on_script: Callable[[ScriptEvent], None] = lambda event: None,
        on_stop_signal: Callable[[StopReason, str], None] | None = None,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world_size = world_size
        self._on_batches = on_batches
        self._on_log = on_log
        self._on_activity = on_activity
        self._on_script = on_script
        self._on_stop_signal = on_stop_signal
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._joined_or_failed = threading.Event()
        self._pending = PendingRequests(world_size)
        self._state = GroupState()
        self._has_shutdown_hook = False
        self.log_dir = log_dir
        self._connections: RankConnections | None = None
        self._stop_coordinator = StopCoordinator(
            world_size,
            lambda: self._send(PauseSteps()),
            lambda end, is_break: self._send(
                ResumeUntil(workload=end.workload, steps=end.steps, is_break=is_break)
            ),
        )
        self._training: PendingRequest | None = None
        self._ranks: list[RankHandle] = []
        self._progress = StallClock(self._ranks)
        self._failures = FirstCause(
            world_size, self._ranks, self._peers, self._pending, self.log_dir, self._end_failed
        )
        try:
            launch = LaunchRequest(
                world_size, working_dir, self.log_dir, environment or {}, self, self._rank_exited,
                should_abort,
            )  # fmt: skip
            self._connections = launcher(launch, self._ranks)
            self._wait_until_joined(JOIN_SECONDS, should_abort)
        except BaseException as error:
            self._abort_joined(error)
            self.kill()
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abort_joined(error)
        self.close()

    @property
    def pids(self) -> list[int]:
        return [self._peers[rank].pid for rank in sorted(self._peers)]

    @property
    def nodes(self) -> list[str]:
        return [self._peers[rank].host for rank in sorted(self._peers)]

    @property
    def _are_launched(self) -> bool:
        return all(rank.is_launched for rank in self._ranks)

    def _wait_until_joined(self, timeout_seconds: float, should_abort: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_seconds
        timer = AnnouncementTimer("starting the ranks", time.monotonic())
        while not self._joined_or_failed.wait(POLL_SECONDS) and time.monotonic() < deadline:
            if (text := timer.due(None, time.monotonic())) is not None:
                self._on_activity(text)
            if should_abort():
                raise Stopped("the run was stopped while its ranks were starting")
        if self._state.failure is not None:
            raise self._state.failure
        missing = sorted(set(range(self.world_size)) - set(self._peers))
        if missing:
            node, logs = None, ""
            if self._are_launched:  # others may start in their place
                node, logs = self._ranks[missing[0]].host, f"; see the logs in {self.log_dir}"
                log_stacks(self._ranks)
            raise LaunchError(
                f"rank {', '.join(map(str, missing))} did not join within {timeout_seconds:g} s"
                f"{logs}",
                node,
            )

    # ---------------------------------------------------------------------------- requests

    def submit(self, request: AnyRequest) -> Future[list[Result]]:
        """Send `request` to every rank; the future has all results, in the order of ranks.

        Raises (the future): RankFailed if a rank dies or its workload raises.
        """
        return self._submit(request).future

    def request(
        self, request: AnyRequest, expect: type[R], stall_seconds: float | None = None
    ) -> list[R]:
        """Send `request` to every rank and wait for all results, in the order of ranks.

        Args:
            stall_seconds: the stall timeout (see `stall_clock`); None: no limit.

        Raises:
            RankFailed: a rank died, or its workload raised.
            Stalled: the ranks made no progress; the group is killed.
            Stopped: `abort` was called; the group is killed.
        """
        pending = self._submit(request)
        results = self._wait_for(pending, stall_seconds)
        typed = [result for result in results if isinstance(result, expect)]
        if len(typed) != len(results):
            raise SlotsError(
                f"{request.title}: expected {expect.__name__} results, got {results!r}"
            )
        return typed

    def _submit(self, request: AnyRequest) -> PendingRequest:
        pending = self._pending.add(request)
        with self._lock:
            refusal, pause = self._state.refusal, self._state.submitted(request)
            if refusal is None:
                self._progress.note_progress()
                self._send(Envelope(number=pending.number, request=request))
                if isinstance(request, TrainBatches):
                    self._training = pending
                self._pause(pause)
        if refusal is not None:
            self._pending.fail_one(pending, refusal)
        return pending

    def _wait_for(self, pending: PendingRequest, stall_seconds: float | None) -> list[Result]:
        if stall_seconds is None:
            return pending.future.result()
        is_waiting = False
        while True:
            was_waiting, is_waiting = is_waiting, self._pending.is_waiting_for_another(pending)
            if was_waiting and not is_waiting:
                self._progress.note_progress()  # not before: the other one may be hanging
            wait_seconds = stall_seconds / CHECKS_PER_TIMEOUT
            if not is_waiting:
                wait_seconds = self._progress.next_check_seconds(pending.request, stall_seconds)
            try:
                return pending.future.result(wait_seconds)
            except TimeoutError:
                pass
            if is_waiting:
                continue
            if self._progress.seconds_without_progress(pending.request) >= stall_seconds:
                raise self._end_with(self._failures.stalled(pending, stall_seconds))

    # ------------------------------------------------------------------------------ stopping

    def stop(self) -> None:
        """End the current training or validation after the same batch on all ranks.

        Later ones end before their first batch, until another trial is built. Other requests are
        carried out as usual.
        """
        with self._lock:
            self._pause(self._state.stop())

    def break_training(self) -> None:
        """End the current train-workload after the same batch on all ranks, its first or later.

        If none runs, the next one ends, unless a checkpoint is saved before. Later ones begin as
        usual. For any thread.
        """
        with self._lock:
            is_training = self._training is not None and not self._training.future.done()
            self._pause(self._state.break_training(is_training=is_training))

    def _pause(self, pause: Pause | None) -> None:
        if pause is not None:
            self._stop_coordinator.start(is_break=pause is Pause.BREAK)

    def abort(self, reason: str) -> None:
        """Kill the ranks; pending requests raise `Stopped` with this reason."""
        self._end_with(Stopped(reason))

    def tell(self, what: Logged | ReportTaken) -> None:
        """Tell the ranks something that needs no answer. Returns at once."""
        self._send(what)

    def _send(self, message: Message) -> None:
        if self._connections is not None:
            self._connections.send(message)

    # -------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Shut the ranks down if they are idle, else kill them. Leaves no process."""
        try:
            self._shut_down()
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL every rank and all processes it has started; pending requests fail."""
        self._state.is_closing = True
        for rank in self._ranks:
            rank.kill()
        for rank in wait_for_end(self._ranks, KILL_SECONDS):
            logger.error(
                "rank %d (process %s) still runs %g s after SIGKILL",
                rank.rank, rank.pid, KILL_SECONDS,
            )  # fmt: skip
        if (refusal := self._state.refusal) is not None:
            self._pending.fail(refusal)
        if self._connections is not None:
            self._connections.close()

    def _shut_down(self) -> None:
        with self._lock:
            if not self._state.can_shut_down(is_busy=bool(self._pending)):
                return
        self._submit(Shutdown())
        self._state.is_closing = True  # from here on, the end of a rank is not a failure
        if wait_for_end(self._ranks, SHUTDOWN_SECONDS):
            then = ", so they are killed" if self._are_launched else ""
            logger.warning("ranks did not shut down within %g s%s", SHUTDOWN_SECONDS, then)

    def _end_failed(self, failure: RankFailed) -> None:
        """End the ranks after one has failed; first give callbacks time for `on_trial_shutdown`.

        A rank whose peer has ended raises from its collective, and then shuts down. A rank that
        hangs there is killed.
        """
        if self._has_shutdown_hook and self._are_launched and not self._state.is_closing:
            self._submit(Shutdown())
            wait_for_end(self._ranks, SHUTDOWN_SECONDS)
        self._end_with(failure)

    def _end_with(self, failure: SlotsError) -> SlotsError:
        """Kill the ranks and fail all requests; return the first failure of the group."""
        with self._lock:
            if not self._state.fail(failure):
                return self._state.failure or failure
        self._abort_joined(failure)
        for rank in self._ranks:
            rank.kill()
        self._joined_or_failed.set()
        self._pending.fail(failure)
        return failure

    def _abort_joined(self, error: BaseException) -> None:
        """Have ranks that another program has started raise this error, and leave."""
        if self._connections is None or self._are_launched:
            return
        if self._state.abort():
            self._send(Abort.of(error))

    # ------------------------------------------------------- events, in the channel's thread

    def rank_joined(self, peer: Peer) -> None:
        self._peers[peer.rank] = peer
        if len(self._peers) == self.world_size:
            self._joined_or_failed.set()

    def message_received(self, rank: int, message: FromRank) -> None:
        if isinstance(message, BatchesTrained):
            self._progress.note_progress()
            self._on_batches(message.batches, message.total)
        elif isinstance(message, BatchesValidated):
            self._progress.note_progress()
        elif isinstance(message, StepsPaused):
            self._stop_coordinator.rank_paused(rank, Position(message.workload, message.steps))
        elif isinstance(message, StopRequested):
            if message.reason is None or self._on_stop_signal is None:
                self.stop()
            else:
                self._on_stop_signal(message.reason, message.detail)
        elif isinstance(message, LogLines):
            for line in message.lines:
                self._on_log(rank, line)
        elif isinstance(message, Activity):
            self._on_activity(message.text)
        elif isinstance(message, ScriptEvent):
            self._progress.note_progress()
            self._on_script(message)
        elif not isinstance(message, Answer):
            pass  # of ranks that have joined, for their launcher
        elif message.error is not None:
            self._failures.note_raised(rank, message.number, message.error)
        elif message.result is not None:
            if isinstance(message.result, TrialBuilt):
                self._has_shutdown_hook = "on_trial_shutdown" in message.result.hooks
            self._pending.note(rank, message.number, message.result)

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        if not self._state.is_closing:
            self._failures.note_disconnected(rank, protocol_error)

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        if not self._state.is_closing:
            self._failures.note_node_lost(ranks, why)

    def _rank_exited(self, rank: int, code: int) -> None:
        """Called in the thread that watches the rank's process."""
        if not self._state.is_closing:
            self._failures.note_exit(rank, code)
