"""A slot group of ranks that another program has started, and that join the driver.

torchrun, `deepspeed`, srun, plain python or a notebook starts the processes, and each joins by
`joined_rank`. On this machine the driver watches their processes, on others their connections.

The group's end does not end their processes. If it fails, each rank gets the failure, raises it and
leaves. A rank of this machine that does not leave within `LEAVE_SECONDS` is killed, unless a person
uses its process. Ranks of other machines end by themselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.messages import (
    Abort,
    BytesWritten,
    DumpStacks,
    FromRank,
    Invitation,
    Message,
    Peer,
    StacksDumped,
)
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.channel import Channel, Listener
from trial_core.processes.slots.launcher import Launcher, LaunchRequest, RankConnections
from trial_core.processes.slots.rank_handle import RankHandle
from trial_core.processes.slots.stacks import STACK_SIGNAL, stack_log

LEAVE_SECONDS = 10.0
"""By then, ranks that can end by themselves have ended: `END_SECONDS` of `joined_rank`."""
LAST_WORDS_SECONDS = 1.0
"""How long a dead rank's last messages are still read."""


def joining(invite: Callable[[Invitation], None], listen: ListenAddress | None = None) -> Launcher:
    """Return a launcher that starts no ranks: the ranks of one slot group join.

    Once they can, `invite` is called with the invitation for each rank. `listen`: see `Channel`.
    """
    has_launched = False

    def launch(request: LaunchRequest, ranks: list[RankHandle]) -> JoinedConnections:
        nonlocal has_launched
        if has_launched:
            raise LaunchError(
                "the ranks cannot be started again: another program has started them (torchrun, "
                "deepspeed, srun, python); start that again"
            )
        has_launched = True
        connections = JoinedConnections(request, listen)
        ranks.extend(connections.ranks)
        try:
            invite(connections.invitation)
        except BaseException:
            connections.close()
            raise
        return connections

    return launch


class JoinedConnections(RankConnections, Listener):
    """The connections to the ranks of one group; listens to their channel."""

    def __init__(self, launch: LaunchRequest, listen: ListenAddress | None) -> None:
        self._listener = launch.listener
        launch.log_dir.mkdir(parents=True, exist_ok=True)
        self._channel = Channel(range(launch.world_size), self, listen)
        self.ranks = [
            JoinedProcess(rank, launch.log_dir, self._channel) for rank in range(launch.world_size)
        ]
        self.invitation = Invitation(
            path=self._channel.address,
            address=self._channel.remote_address,
            secret=self._channel.secret,
            log_dir=str(launch.log_dir),
        )

    def send(self, message: Message) -> None:
        if isinstance(message, Abort):
            for rank in self.ranks:
                rank.was_told_to_leave()
        self._channel.send(message)

    def close(self) -> None:
        self._channel.close()

    # -------------------------------------------------------------- in the channel's thread

    def rank_joined(self, peer: Peer) -> None:
        self.ranks[peer.rank].has_joined(peer, lambda: self.rank_disconnected(peer.rank, None))
        self._listener.rank_joined(peer)

    def message_received(self, rank: int, message: FromRank) -> None:
        if isinstance(message, BytesWritten):
            self.ranks[rank].bytes_written = message.count
        elif isinstance(message, StacksDumped):
            with self.ranks[rank].log_path.open("a") as log:
                log.write(message.text)
        else:
            self._listener.message_received(rank, message)

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        if self.ranks[rank].has_left():
            self._listener.rank_disconnected(rank, protocol_error)

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        self._listener.node_lost(ranks, why)


class JoinedProcess(RankHandle):
    """The process of a rank that another program has started.

    Its stdout and stderr do not belong to the run: its log here has its stacks alone.
    """

    is_launched = False

    def __init__(self, rank: int, log_dir: Path, channel: Channel) -> None:
        super().__init__(rank, "a machine that is not known yet", stack_log(log_dir, rank))
        self.log_path.touch()
        self.bytes_written = 0
        self._channel = channel
        self._lock = threading.Lock()
        self._process: int | None = None
        self._is_interactive = False
        self._is_given_up = False
        self._leaves_until: float | None = None
        self._ended.set()  # before it has joined, no one has to wait for it

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the rank has left. Return whether it has, or is left alone."""
        deadline = time.monotonic() + timeout_seconds
        if not self._is_given_up:
            return self._ended.wait(timeout_seconds)
        until = self._leaves_until or 0.0
        if self._ended.wait(max(0.0, min(until, deadline) - time.monotonic())):
            return True
        if until > deadline:
            return False
        if self._leaves_until is None or self._process is None or self._is_interactive:
            return True
        self.signal(signal.SIGKILL)
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Only note it: the rank leaves by itself, or `wait` kills it if it was told to leave."""
        self._is_given_up = True

    def was_told_to_leave(self) -> None:
        self._leaves_until = time.monotonic() + LEAVE_SECONDS

    def signal(self, number: int) -> None:
        """Send the rank a signal, if it still runs; on another machine, only the one for stacks."""
        with self._lock:
            if self._process is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, number)
                return
        if number == STACK_SIGNAL:
            self._channel.send(DumpStacks(), self.rank)

    def written_bytes(self) -> int:
        return self.bytes_written

    # -------------------------------------------------------------- in the channel's thread

    def has_joined(self, peer: Peer, on_death: Callable[[], None]) -> None:
        """Watch its process if it is here, since a forked child may keep the connection open."""
        self.pid, self.host, self._is_interactive = peer.pid, peer.host, peer.is_interactive
        self._ended.clear()
        if peer.is_here:
            with suppress(OSError):  # forbidden in a container: its connection is watched
                self._process = os.pidfd_open(peer.pid)
                asyncio.get_running_loop().add_reader(self._process, self._died, on_death)

    def _died(self, on_death: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if self._process is not None:
            loop.remove_reader(self._process)
        loop.call_later(LAST_WORDS_SECONDS, on_death)

    def has_left(self) -> bool:
        """Note that it has left, or is dead. Return whether that is new."""
        if self._ended.is_set():
            return False
        with self._lock:
            if self._process is not None:
                asyncio.get_running_loop().remove_reader(self._process)
                os.close(self._process)
                self._process = None
        self._ended.set()
        return True
