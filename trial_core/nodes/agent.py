"""The agent of a node: starts, watches and ends the node's ranks for a driver elsewhere.

The ranks talk to the agent as they talk to a driver on their own machine, and it relays what they
say. Their interpreters are forked from one that stays while the agent lives, so ranks start fast
also after a restart. The agent's folder has their logs, which the driver gets too, the code, and
what they stage and fetch.

The agent ends, with all its ranks, when the run has ended, when the driver is gone or has been
silent for `SILENCE_SECONDS`. By SIGTERM or SIGINT it asks the driver to let it leave, which has the
ranks save first. If it is killed, its fork server ends the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import LaunchError, TrialflowError
from trial_core.messages import FromRank, Message, Peer, encode
from trial_core.nodes.examination import Examination
from trial_core.nodes.frames import read_frame
from trial_core.nodes.node_messages import (
    ALIVE_SECONDS,
    SILENCE_SECONDS,
    AgentHello,
    Alive,
    Draining,
    EndRanks,
    ForwardSignal,
    Leave,
    NodeReady,
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
    to_agent_decoder,
)
from trial_core.nodes.tls import agent_context, digest_of
from trial_core.nodes.versions import own_versions
from trial_core.run.run_dirs import RUN_DIR_VARIABLE, clear_rank_files
from trial_core.slots.accelerators import resolve_slot_count
from trial_core.slots.fork_server import ForkServer, disk_bytes
from trial_core.slots.framing import (
    HANDSHAKE_SECONDS,
    NONCE_BYTES,
    PROOF_BYTES,
    ProtocolError,
    check_proof,
    frame,
    new_nonce,
    proof,
)
from trial_core.slots.launcher import Launch, LocalLink, Place, launch_here, rank_environment
from trial_core.slots.rank_handle import RankHandle
from trial_core.slots.rank_network import addresses_in
from trial_core.text_format import plural
from trial_core.transfer.code_folder import unpack_code

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
LOG_SECONDS = 0.25
"""How often what was added to the ranks' logs is sent."""
LOG_BYTES = 2**18
"""At most so much of a rank's log is sent at once."""
KILL_SECONDS = 30.0


@dataclass
class RanksHere:
    """The ranks of one launch on this node."""

    number: int
    log_dir: Path
    working_dir: Path
    environment: dict[str, str]
    store: socket.socket | None
    ranks: list[RankHandle] = field(default_factory=list)
    link: LocalLink | None = None
    sent_bytes: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)


class Agent:
    """Serves a driver until it or the run ends. All methods run in the event loop's thread.

    Args:
        folder: an empty folder for this agent alone.
        fork_server: starts the ranks.
        name: the node's name among those of the engine; empty: the driver chooses one.
        slots: how many ranks this node offers; None: as the driver says.
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
        # What may take long is done in one other thread, in the driver's order.
        self._worker = ThreadPoolExecutor(1, "agent")

    async def serve(self, driver: str, token: str, wait_seconds: float) -> signal.Signals | None:
        """Join the driver, and serve it until the run ends, or this node may leave it.

        Args:
            driver: as `trial_core.nodes.hub.driver_address` writes it.
            wait_seconds: how long to try, while the driver cannot be reached.

        Returns:
            The signal that has asked this node to leave; None: there was none.

        Raises:
            LaunchError: the driver cannot be reached, refuses this node, or is gone; or a second
                signal came.
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
        tasks = [asyncio.ensure_future(each) for each in (self._beat(), self._send_logs())]
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._ask_to_leave, number)
        try:
            await self._obey(reader)
        finally:
            for task in tasks:
                task.cancel()
            await self._loop.run_in_executor(self._worker, self._end_ranks)
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

    # ----------------------------------------------------------------------- the driver says

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = to_agent_decoder.decode(await read_frame(reader, self._heard))
            except (OSError, EOFError) as error:
                if self._loop.time() - self._heard_at >= SILENCE_SECONDS:
                    why = f"the driver was silent for {SILENCE_SECONDS:g} s"
                else:
                    why = "the driver is gone"
                raise LaunchError(why) from error
            except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise LaunchError(f"the driver has sent an invalid message: {error}") from error
            if isinstance(message, Leave):
                return
            if isinstance(message, Refused):
                raise LaunchError(f"the driver refuses this node: {message.why}")
            self._do(message)

    def _do(self, message: ToAgent) -> None:
        ranks = self._ranks
        if isinstance(message, Alive):
            return
        if isinstance(message, ToRanks):
            if ranks is not None and self._is_of(message.launch) and ranks.link is not None:
                ranks.link.send_encoded(message.data)
        else:
            self._worker.submit(self._work, message)

    def _work(self, message: ToAgent) -> None:
        """Carry out what may take long. In the worker's thread."""
        try:
            if isinstance(message, Welcome):
                self._get_ready(message)
            elif isinstance(message, PrepareRanks):
                self._prepare(message)
            elif isinstance(message, StartRanks):
                self._start(message)
            elif isinstance(message, ForwardSignal):
                self._signal(message)
            elif isinstance(message, Question):
                self._send(self._examination.answer(message, self._address))
            elif isinstance(message, EndRanks) and self._is_of(message.launch):
                self._end_ranks()
        except Exception:
            logger.exception("this node ends: %s failed", type(message).__name__)
            self._loop.call_soon_threadsafe(self._writer.close)

    def _get_ready(self, welcome: Welcome) -> None:
        environment = {**os.environ, **welcome.environment}
        wanted = welcome.slots_per_node or "auto"
        try:
            self._address = self._address_in(welcome.network)
            slots = resolve_slot_count(wanted, environment)
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
        """This node's address on the ranks' network."""
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
            _check_storage(message)
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
        """The folder of the run's code on this node."""
        if message.code_digest is None:
            if not os.path.isdir(message.code_folder):
                raise LaunchError(
                    f"there is no code folder {message.code_folder} here, and environment.code is "
                    "shared: mount it under that path on every node, or have the code sent "
                    "(environment.code: folder)"
                )
            return Path(message.code_folder)
        folder = self._folder / f"code-{message.code_digest.removeprefix('sha256:')[:16]}"
        if message.code is not None:
            unpack_code(message.code, folder)
        return folder

    def _start(self, message: StartRanks) -> None:
        here = self._ranks
        if here is None or not self._is_of(message.launch):
            return
        ranks = range(message.first_rank, message.first_rank + message.count)
        place = Place(
            ranks, message.world_size, message.store, self._address, message.node_index,
            message.nodes,
        )  # fmt: skip
        launch = Launch(
            message.world_size, here.working_dir, here.log_dir, here.environment,
            _Relay(self, here.number),
            lambda rank, code: self._call(self._rank_ended, here, rank, code),
        )  # fmt: skip
        try:
            here.link = launch_here(launch, place, self._fork_server, here.store, here.ranks)
        except LaunchError as error:
            self._send(RanksNotStarted(launch=here.number, why=str(error)))
        finally:
            if here.store is not None:
                here.store.close()

    def _signal(self, message: ForwardSignal) -> None:
        here = self._ranks
        if here is None or not self._is_of(message.launch):
            return
        for rank in here.ranks:
            if rank.rank == message.rank:
                rank.kill() if message.signal == signal.SIGKILL else rank.signal(message.signal)

    def _is_of(self, launch: int) -> bool:
        """Whether a message is of the launch whose ranks are here now."""
        return self._ranks is not None and self._ranks.number == launch

    def _end_ranks(self) -> None:
        """Kill the ranks of the last launch."""
        here, self._ranks = self._ranks, None
        if here is None:
            return
        for rank in here.ranks:
            rank.kill()
        for rank in here.ranks:
            rank.wait(KILL_SECONDS)
        if here.link is not None:
            here.link.close()

    # ----------------------------------------------------------------------- this node says

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function in the event loop's thread. For any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _send(self, message: Message) -> None:
        """Send to the driver. For any thread."""
        self._call(self._write, frame(encode(message)))

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _beat(self) -> None:
        """Send signs of life, and disconnect when the driver sends none."""
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
                self._send_log(here, rank)
                await self._writer.drain()  # so that a slow connection slows the logs alone
            written = {rank.rank: disk_bytes(rank.pid) for rank in list(here.ranks)}
            if written != here.written:
                here.written = written
                self._send(RanksWrote(launch=here.number, written_bytes=written))

    def _send_log(self, here: RanksHere, rank: RankHandle) -> bool:
        """Send what was added to a rank's log. Return whether there may be more."""
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
        return len(data) == LOG_BYTES

    def _rank_ended(self, here: RanksHere, rank: int, code: int) -> None:
        for process in here.ranks:
            if process.rank == rank:
                while self._send_log(here, process):
                    pass
        self._send(RankGone(launch=here.number, rank=rank, code=code))


class _Relay:
    """Passes on what ranks say. A `Listener` of their channel, called in its thread."""

    def __init__(self, agent: Agent, launch: int) -> None:
        self._agent = agent
        self._launch = launch

    def rank_joined(self, peer: Peer) -> None:
        self._agent._send(
            RankJoined(launch=self._launch, rank=peer.rank, pid=peer.pid, host=peer.host)
        )

    def message_received(self, rank: int, message: FromRank) -> None:
        self._agent._send(RankSent(launch=self._launch, rank=rank, data=encode(message)))

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        self._agent._send(RankLeft(launch=self._launch, rank=rank, protocol_error=protocol_error))

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        """A channel within a machine never tells this."""


def _check_storage(message: PrepareRanks) -> None:
    """Check that this node sees the storage that the driver sees.

    Raises:
        LaunchError, StorageError: it does not, or cannot reach it.
    """
    storage = CheckpointStore.from_spec(message.storage).storage
    if storage.read(message.storage_key) is None:
        raise LaunchError(
            f"this node sees another storage than the driver: {storage.url} has no "
            f"{message.storage_key} here. Mount that folder on every node, or use an object "
            "storage (checkpoint_storage)"
        )


async def join(
    driver: str, token: bytes, wait_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the driver's addresses that answers, and prove the token.

    Raises:
        LaunchError: none does in time; or it does not know the token.
    """
    addresses = parse_driver_address(driver)
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        problems = []
        for host, port in addresses:
            try:
                return await asyncio.wait_for(connect(host, port, token), HANDSHAKE_SECONDS)
            except ProtocolError as error:
                raise LaunchError(f"the driver at {host}:{port} is another one: {error}") from None
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                problems.append(f"{host}:{port}: {str(error) or type(error).__name__}")
        if asyncio.get_running_loop().time() > deadline:
            raise LaunchError(
                f"no driver answered within {wait_seconds:g} s ({'; '.join(problems)}): check that "
                "it runs, that its address can be reached from here, and that the token is that "
                "of its run"
            )
        await asyncio.sleep(RETRY_SECONDS)


async def connect(
    host: str, port: int, token: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver. Both ends prove the token.

    Raises:
        ProtocolError: the driver does not know the token, or a relay is between.
        EOFError: it has closed the connection: it knows another token.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=agent_context())
    try:
        secured = writer.get_extra_info("ssl_object")
        certificate = digest_of(secured.getpeercert(binary_form=True))
        theirs = await reader.readexactly(NONCE_BYTES)
        nonce = new_nonce()
        writer.write(proof(token, "agent", theirs, certificate) + nonce)
        check_proof(token, "driver", nonce, await reader.readexactly(PROOF_BYTES), certificate)
    except BaseException:
        writer.close()
        raise
    return reader, writer


def parse_driver_address(text: str) -> list[tuple[str, int]]:
    """The hosts and ports in ``tls://HOST:PORT,…``.

    Raises:
        LaunchError: it is something else.
    """
    scheme, _, rest = text.partition("://")
    found = []
    for part in rest.split(","):
        try:
            parts = urllib.parse.urlsplit(f"//{part}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if scheme != "tls" or not host or port is None:
            raise LaunchError(
                f"the driver's address is {text!r}, expected tls://HOST:PORT as the driver shows it"
            )
        found.append((host, port))
    return found
