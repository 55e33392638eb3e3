"""The slot group: all the ranks of a trial, launched once and kept warm for the whole run.

Every rank's process is watched, and its connection, so waiting for an answer needs no timeout to
notice a death. When a rank fails the group is over: the others are killed (they may be inside a
collective that can never complete) and everything that waits raises `RankFailed` with the first
cause.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from trial_core.errors import DeadlineExceeded, LaunchError, RankFailed, SlotsError
from trial_core.messages import (
    Answer,
    AnyRequest,
    BatchesTrained,
    Envelope,
    LogLines,
    Peer,
    Result,
    Shutdown,
)
from trial_core.slots.channel import Channel
from trial_core.slots.failures import FirstCause, how_it_ended
from trial_core.slots.launcher import RankProcess, launch_ranks

logger = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
SHUTDOWN_SECONDS = 10.0
KILL_SECONDS = 30.0
# How long a rank may live on once its connection has ended.
LEFT_SECONDS = 5.0

R = TypeVar("R", bound=Result)


@dataclass
class _Pending:
    """A request on its way: who has answered, and who waits."""

    request: AnyRequest
    future: Future[list[Result]] = field(default_factory=Future)
    results: dict[int, Result] = field(default_factory=dict)


class SlotGroup:
    """The driver's handle on a trial's ranks. A context manager: leaving it leaves no process.

    Args:
        world_size: ranks to start on this machine.
        working_dir: where the ranks run (the folder of the user's code).
        log_dir: where ``rank-N.log`` files go.
        environment: the experiment's environment variables.
        on_batches: told how far training has come, a few times a second.
        on_log: told new lines of a rank's log, rate-capped by the rank.

    Both callbacks run in the channel's thread and must return at once.
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
    ) -> None:
        self.world_size = world_size
        self._on_batches = on_batches
        self._on_log = on_log
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._joined_or_failed = threading.Event()
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._closing = False
        self._failure: SlotsError | None = None
        self._causes = FirstCause(world_size, self._end_with)
        self._own_log_dir = log_dir is None
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="trialflow-logs-"))
        self._channel = Channel(world_size, self)
        self._ranks: list[RankProcess] = []
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
            self._wait_until_joined(JOIN_SECONDS)
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
        pending = _Pending(request)
        with self._lock:
            if self._failure is not None or self._closing:
                pending.future.set_exception(self._failure or _closed())
                return pending.future
            self._number += 1
            number = self._number
            self._pending[number] = pending
        self._channel.send(Envelope(number=number, request=request))
        return pending.future

    def request(
        self, request: AnyRequest, expect: type[R], timeout_seconds: float | None = None
    ) -> list[R]:
        """Send `request` to every rank and wait for all results, in the order of ranks.

        Args:
            expect: the type of result that this request leads to.
            timeout_seconds: a deadline; None where the workload's length is the user's business.

        Raises:
            RankFailed: a rank died, or its workload raised.
            DeadlineExceeded: ranks are alive but silent; the group is killed.
        """
        future = self.submit(request)
        try:
            results = future.result(timeout_seconds)
        except FutureTimeout:
            failure = DeadlineExceeded(
                f"no answer to {_name(request)} within {timeout_seconds:g} s from "
                f"rank {', '.join(map(str, self._silent_on(request)))}; the slot group was killed. "
                f"Logs: {self.log_dir}"
            )
            self._end_with(failure)
            raise failure from None
        typed = [result for result in results if isinstance(result, expect)]
        if len(typed) != len(results):
            raise SlotsError(f"{_name(request)} was answered by something else: {results!r}")
        return typed

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
        self._fail_pending(self._failure or _closed())
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

    def rank_said(self, rank: int, message: Answer | BatchesTrained | LogLines) -> None:
        """Part of the channel's `Listener`."""
        if isinstance(message, BatchesTrained):
            self._on_batches(message.batches)
        elif isinstance(message, LogLines):
            for line in message.lines:
                self._on_log(rank, line)
        elif message.error is not None:
            self._causes.note(self._failed_by_error(rank, message))
        elif message.result is not None:
            self._note_result(rank, message.number, message.result)

    def rank_left(self, rank: int, why: str | None) -> None:
        """Part of the channel's `Listener`."""
        if self._closing:
            return
        if why is not None:
            self._causes.note(self._failed(rank, error_type="ProtocolError", error_message=why))
        else:
            # Most often it has died, which its watcher tells, with the signal. If it has not:
            late = threading.Timer(LEFT_SECONDS, lambda: self._causes.note(self._failed(rank)))
            late.daemon = True
            late.start()

    # ------------------------------------------------------------ what a rank's watcher tells

    def _rank_exited(self, rank: int, code: int) -> None:
        if self._closing:
            return
        exit_code, signal_name = how_it_ended(code)
        self._causes.note(self._failed(rank, exit_code=exit_code, signal_name=signal_name))

    # ---------------------------------------------------------------------------- internals

    def _wait_until_joined(self, timeout_seconds: float) -> None:
        self._joined_or_failed.wait(timeout_seconds)
        if self._failure is not None:
            raise self._failure
        missing = sorted(set(range(self.world_size)) - set(self._peers))
        if missing:
            raise LaunchError(
                f"rank {', '.join(map(str, missing))} did not join within "
                f"{timeout_seconds:g} s; see the logs in {self.log_dir}"
            )

    def _note_result(self, rank: int, number: int, result: Result) -> None:
        with self._lock:
            pending = self._pending.get(number)
            if pending is None:
                return
            pending.results[rank] = result
            if len(pending.results) < self.world_size:
                return
            del self._pending[number]
        pending.future.set_result([pending.results[r] for r in range(self.world_size)])

    def _end_with(self, failure: SlotsError) -> None:
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = failure
        for rank in self._ranks:
            rank.kill()
        self._joined_or_failed.set()
        self._fail_pending(failure)

    def _fail_pending(self, failure: SlotsError) -> None:
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.future.set_exception(failure)

    def _during(self) -> str:
        with self._lock:
            names = [_name(pending.request) for pending in self._pending.values()]
        return " and ".join(names) or "no workload"

    def _silent_on(self, request: AnyRequest) -> list[int]:
        with self._lock:
            for pending in self._pending.values():
                if pending.request is request:
                    return sorted(set(range(self.world_size)) - set(pending.results))
        return []

    def _failed_by_error(self, rank: int, answer: Answer) -> RankFailed:
        pending = self._pending.get(answer.number)
        error = answer.error
        return self._failed(
            rank,
            during=_name(pending.request) if pending else "an earlier workload",
            error_type=error.error_type if error else None,
            is_ours=error.is_ours if error else False,
            error_message=error.message if error else None,
            rank_traceback=error.traceback if error else None,
        )

    def _failed(self, rank: int, during: str | None = None, **how: Any) -> RankFailed:
        peer, process = self._peers.get(rank), self._ranks[rank]
        return RankFailed(
            rank=rank,
            host=peer.host if peer else socket.gethostname(),
            during=during or (self._during() if peer else "starting up"),
            log_tail=process.log_tail(),
            log_path=str(process.log_path),
            **how,
        )


def _name(request: AnyRequest) -> str:
    return type(request).__name__


def _closed() -> SlotsError:
    return SlotsError(f"the slot group was closed (by process {os.getpid()})")
