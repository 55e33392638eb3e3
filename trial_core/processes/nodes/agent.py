"""The agent of a node: starts, watches and ends the node's ranks for a driver elsewhere.

The ranks talk to the agent as to a driver on their own machine, and it relays their messages. Their
interpreters are forked from one that stays while the agent lives, so ranks start fast also after a
restart. The agent's folder has their logs, which the driver gets too, the code, and their staged
and fetched files.

The agent ends, with all its ranks, when the run has ended, when the driver is gone or has been
silent for `SILENCE_SECONDS`. After SIGTERM, SIGINT or SIGHUP it asks the driver to let it leave;
the driver first has the ranks save. If it is killed, its fork server ends the ranks.

Work that may take long is done in one other thread, in the driver's order. The agent's end does not
wait for work that hangs, such as a read from a file server that is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint.transfer.code_archive import unpack_code
from trial_core.common.text_format import plural
from trial_core.errors import LaunchError, TrialflowError
from trial_core.messages import FromRank, Message, Peer, encode
from trial_core.processes.machine.accelerators import resolve_slot_count
from trial_core.processes.machine.run_dirs import RUN_DIR_VARIABLE, clear_rank_files
from trial_core.processes.nodes.examination import Examination, check_storage
from trial_core.processes.nodes.node_messages import (
    ALIVE_SECONDS,
    SILENCE_SECONDS,
    AgentHello,
    Alive,
    Draining,
    EndRanks,
    ForwardSignal,
    Leave,
    NodeReady,
    OfLaunch,
    PrepareRanks,
    Question,
    RankGone,
    RankJoined,
    RankLeft,
    RankLogged,
    RankSent,
    RanksNotStarted,
    RanksPrepared,
    RanksWrote,
    Refused,
    StartRanks,
    ToAgent,
    ToRanks,
    Welcome,
    decode_to_agent,
    own_versions,
)
from trial_core.processes.slots.addresses import addresses_in
from trial_core.processes.slots.channel import Channel, Listener
from trial_core.processes.slots.connection import join
from trial_core.processes.slots.fork_server import ForkServer, disk_bytes
from trial_core.processes.slots.framing import ProtocolError, frame, read_frame
from trial_core.processes.slots.launcher import (
    LaunchRequest,
    MachineShare,
    launch_here,
    rank_environment,
)
from trial_core.processes.slots.rank_handle import RankHandle, wait_for_end

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.25
"""How often new text of the ranks' logs is sent."""
LOG_BYTES = 2**18
"""The most bytes of a rank's log that are sent at once."""
KILL_SECONDS = 30.0
END_SECONDS = 10.0
"""How long the agent's end waits for its work for the driver, and for the end of its ranks."""


@dataclass
class RanksHere:  # of one launch
    number: int
    log_dir: Path
    working_dir: Path
    environment: dict[str, str]
    store: socket.socket | None
    ranks: list[RankHandle] = field(default_factory=list)
    connections: Channel | None = None
    sent_bytes: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)


class Agent:
    """Serves a driver until it or the run ends. All methods run in the event loop's thread.

    It has an empty folder for itself alone. `name` and `slots` are as in `AgentHello`.
    """

    def __init__(
        self, folder: Path, fork_server: ForkServer, name: str = "", slots: int | None = None
    ) -> None:
        self._folder = folder
        self._fork_server = fork_server
        self._name = name
        self._slots = slots
        self._address = ""
        self._asked_by: signal.Signals | None = None
        self._ranks: RanksHere | None = None
        self._examination = Examination(folder)
        self._orders: queue.SimpleQueue[ToAgent | None] = queue.SimpleQueue()
        self._has_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pacing = asyncio.Lock()  # before Python 3.12 only one task may wait for it
        self.hangs_in = ""
        """The driver's message on which the agent still works."""

    async def serve(self, driver: str, token: str, wait_seconds: float) -> signal.Signals | None:
        """Join the driver, and serve it until the run ends or this node may leave it.

        Returns the signal that has asked this node to leave, or None. Raises LaunchError if the
        driver cannot be reached, refuses this node, or is gone; or a second signal came.
        """
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await join(driver, token.encode(), wait_seconds)
        self._heard()
        self._send(
            AgentHello(
                node=self._name,
                host=socket.gethostname(),
                pid=os.getpid(),
                slots=self._slots,
                versions=own_versions(),
            )
        )
        # It does not keep the process alive, because its work may hang.
        threading.Thread(target=self._work, name="agent", daemon=True).start()
        self._begin(self._beat())
        self._begin(self._send_logs())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup ignores it
            self._loop.add_signal_handler(number, self._ask_to_leave, number)
        try:
            await self._obey(reader)
        finally:
            for task in self._tasks:
                task.cancel()
            self._orders.put(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), END_SECONDS)
            self._examination.close()
            self._writer.close()
        return self._asked_by

    def _ask_to_leave(self, number: signal.Signals) -> None:
        """Leave when the ranks have saved; at the second signal, now."""
        if self._asked_by is not None:
            logger.warning("this node leaves the run at once: a second signal")
            self._writer.transport.abort()  # `close` would wait for a silent driver
            return
        logger.warning("this node leaves the run when that has saved; a second signal: at once")
        self._asked_by = number
        self._send(Draining(why=f"its agent was asked to leave ({number.name})"))

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = decode_to_agent(await read_frame(reader, self._heard))
            except (OSError, EOFError) as error:
                if self._loop.time() - self._heard_at >= SILENCE_SECONDS:
                    why = f"the driver was silent for {SILENCE_SECONDS:g} s"
                else:
                    why = "the driver is gone"
                raise LaunchError(why) from error
            except (ProtocolError, msgspec.MsgspecError) as error:
                raise LaunchError(f"the driver has sent an invalid message: {error}") from error
            if isinstance(message, Leave):
                return
            if isinstance(message, Refused):
                raise LaunchError(f"the driver refuses this node: {message.why}")
            if not isinstance(message, Alive):
                self._orders.put(message)

    # ------------------------------------------------------------- in the thread of `_work`

    def _work(self) -> None:
        """Carry out the driver's messages until `serve` ends; then end the ranks."""
        while (message := self._orders.get()) is not None:
            self.hangs_in = type(message).__name__
            self._carry_out(message)
            self.hangs_in = ""
        try:
            self._end_ranks()
        finally:
            self._call(self._has_ended.set)

    def _carry_out(self, message: ToAgent) -> None:
        try:
            if isinstance(message, Welcome):
                self._get_ready(message)
            elif isinstance(message, PrepareRanks):
                self._prepare(message)
            elif isinstance(message, Question):
                self._send(self._examination.answer(message, self._address))
            elif isinstance(message, OfLaunch):
                self._carry_out_for_ranks(message)
        except Exception:
            logger.exception("this node ends: %s failed", type(message).__name__)
            self._call(self._writer.close)

    def _carry_out_for_ranks(self, message: OfLaunch) -> None:
        here = self._ranks
        if here is None or here.number != message.launch:
            return  # that launch has ended
        if isinstance(message, StartRanks):
            self._start(here, message.share)
        elif isinstance(message, ToRanks) and here.connections is not None:
            here.connections.send_encoded(message.data)
        elif isinstance(message, ForwardSignal):
            for rank in here.ranks:
                if rank.rank == message.rank:
                    rank.signal(message.signal)
        elif isinstance(message, EndRanks):
            self._end_ranks()

    def _get_ready(self, welcome: Welcome) -> None:
        environment = {**os.environ, **welcome.environment}
        try:
            self._address = self._address_in(welcome.network)
            slots = resolve_slot_count(welcome.slots_per_node or "auto", environment)
            # So that a spare can fork ranks at once when it is needed.
            self._fork_server.prepare(
                rank_environment(slots, self._rank_variables(welcome.environment), self._address),
                self._folder,
                self._folder / "fork-server.log",
            )
        except (TrialflowError, OSError) as error:
            self._send(NodeReady(problem=str(error)))
            return
        logger.info(
            "joined as node %s with %s, at %s", welcome.node, plural(slots, "slot"), self._address
        )
        self._send(NodeReady(slots=slots, address=self._address))

    def _address_in(self, network: str | None) -> str:
        if network is None:
            address: str = self._writer.get_extra_info("sockname")[0]
            return address.removeprefix("::ffff:")
        found = addresses_in(network)
        if not found:
            raise LaunchError(
                f"resources.network is {network}, and this machine has no such interface, and no "
                "address in such a network; give an interface's name, or a network such as "
                "10.0.0.0/16"
            )
        return found[0]

    def _prepare(self, message: PrepareRanks) -> None:
        try:
            working_dir = self._code(message)
            if message.storage_key is not None:
                check_storage(message.storage, message.storage_key)
            store = None
            if message.hosts_store:
                family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
                # Bound here, so that no other process can take the port.
                store = socket.create_server((self._address, 0), family=family)
        except (TrialflowError, OSError) as error:
            self._send(RanksPrepared(launch=message.launch, problem=str(error)))
            return
        clear_rank_files(self._folder)
        self._ranks = RanksHere(
            message.launch,
            self._folder / "logs" / str(message.launch),
            working_dir,
            self._rank_variables(message.environment),
            store,
        )
        port = store.getsockname()[1] if store is not None else 0
        self._send(RanksPrepared(launch=message.launch, store_port=port))

    def _rank_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {**environment, RUN_DIR_VARIABLE: str(self._folder)}

    def _code(self, message: PrepareRanks) -> Path:
        if message.code_digest is None:
            if not os.path.isdir(message.code_folder):
                raise LaunchError(
                    f"there is no code folder {message.code_folder} here, and environment.code is "
                    "shared: mount it under that path on every node, or have the code sent "
                    "(environment.code: folder)"
                )
            return Path(message.code_folder)
        folder = self._folder / f"code-{message.code_digest[:16]}"
        if message.code is not None:
            unpack_code(message.code, folder, "the code that the driver sends")
        return folder

    def _start(self, here: RanksHere, share: MachineShare) -> None:
        launch = LaunchRequest(
            share.world_size, here.working_dir, here.log_dir, here.environment,
            _Relay(self, here.number),
            lambda rank, code: self._call(self._rank_ended, here, rank, code),
        )  # fmt: skip
        try:
            here.connections = launch_here(launch, share, self._fork_server, here.store, here.ranks)
        except LaunchError as error:
            self._send(RanksNotStarted(launch=here.number, why=str(error)))
        finally:
            if here.store is not None:
                here.store.close()

    def _end_ranks(self) -> None:
        here, self._ranks = self._ranks, None
        if here is None:
            return
        for rank in here.ranks:
            rank.kill()
        wait_for_end(here.ranks, KILL_SECONDS)
        if here.connections is not None:
            here.connections.close()

    # ----------------------------------------------------------------------- this node says

    def _call(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _send(self, message: Message) -> None:
        """For any thread."""
        self._call(self._write, frame(encode(message)))

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _beat(self) -> None:
        """Send signs of life, and disconnect if the driver sends none."""
        while self._loop.time() - self._heard_at < SILENCE_SECONDS:
            self._send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)
        self._writer.transport.abort()

    def _heard(self) -> None:
        self._heard_at = self._loop.time()

    async def _send_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_SECONDS)
            here = self._ranks
            if here is None:
                continue
            for rank in list(here.ranks):
                await self._send_log(here, rank)
            written = {rank.rank: disk_bytes(rank.pid) for rank in list(here.ranks)}
            if written != here.written:
                here.written = written
                self._send(RanksWrote(launch=here.number, written_bytes=written))

    async def _send_log(self, here: RanksHere, rank: RankHandle) -> bool:
        """Send the new part of a rank's log. Return whether there may be more.

        A slow connection delays only the logs: the next piece is read once this one is sent.
        """
        begin = here.sent_bytes.get(rank.rank, 0)
        try:
            with rank.log_path.open("rb") as log:
                log.seek(begin)
                data = log.read(LOG_BYTES)
        except OSError:  # it was deleted
            return False
        if data:
            here.sent_bytes[rank.rank] = begin + len(data)
            self._write(frame(encode(RankLogged(launch=here.number, rank=rank.rank, data=data))))
        with contextlib.suppress(OSError):  # the connection is lost: `_obey` notices it
            async with self._pacing:
                await self._writer.drain()
        await asyncio.sleep(0)  # a fast connection keeps the loop no longer
        return len(data) == LOG_BYTES

    def _rank_ended(self, here: RanksHere, rank: int, code: int) -> None:
        self._begin(self._tell_end(here, rank, code))

    async def _tell_end(self, here: RanksHere, rank: int, code: int) -> None:
        """Tell that a rank has ended, once its whole log was sent."""
        for process in here.ranks:
            if process.rank == rank:
                while await self._send_log(here, process):
                    pass
        self._send(RankGone(launch=here.number, rank=rank, code=code))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Relay(Listener):
    """Passes on the ranks' messages. Called in the thread of their channel."""

    def __init__(self, agent: Agent, launch: int) -> None:
        self._agent = agent
        self._launch = launch

    def rank_joined(self, peer: Peer) -> None:
        self._agent._send(RankJoined(launch=self._launch, rank=peer.rank, pid=peer.pid))

    def message_received(self, rank: int, message: FromRank) -> None:
        self._agent._send(RankSent(launch=self._launch, rank=rank, data=encode(message)))

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        self._agent._send(RankLeft(launch=self._launch, rank=rank, protocol_error=protocol_error))

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        """Never called by a channel within a machine."""
