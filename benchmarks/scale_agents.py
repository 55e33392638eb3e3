"""A process with many simulated agents: ``python -m benchmarks.scale_agents``.

They join as real agents do and speak the same protocol, but start no processes. Their ranks join at
once and answer `Ping` and `Shutdown`; other requests stay without an answer, as in long training.

The process reads the run's token from its standard input, says that it is ready, and joins when it
reads another line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys

from trial_core.messages import (
    Answer,
    Done,
    Envelope,
    Message,
    Ping,
    Shutdown,
    decode_from_driver,
    encode,
)
from trial_core.processes.nodes.node_messages import (
    ALIVE_SECONDS,
    AgentHello,
    Alive,
    ForwardSignal,
    Leave,
    NodeReady,
    PrepareRanks,
    RankGone,
    RankJoined,
    RankSent,
    RanksPrepared,
    StartRanks,
    ToAgent,
    ToRanks,
    Welcome,
    decode_to_agent,
    own_versions,
)
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS
from trial_core.processes.slots.connection import join
from trial_core.processes.slots.framing import HEADER, frame, frame_length

READY = "ready"
JOIN_SECONDS = 60.0
VERSIONS = own_versions()


class SimulatedAgent:
    """An agent without processes.

    Args:
        node: the agent's name.
        slots: the number of ranks that it offers.
    """

    def __init__(self, node: str, slots: int) -> None:
        self._node = node
        self._slots = slots
        self._ranks: range = range(0)

    async def serve(self, driver: str, token: str) -> None:
        """Join the driver, and serve it until the run ends or the driver is gone."""
        reader, self._writer = await join(driver, token.encode(), JOIN_SECONDS)
        self._say(
            AgentHello(
                node=self._node,
                host=socket.gethostname(),
                pid=os.getpid(),
                slots=self._slots,
                versions=VERSIONS,
            )
        )
        beating = asyncio.ensure_future(self._beat())
        try:
            while True:
                length = frame_length(await reader.readexactly(HEADER.size))
                message = decode_to_agent(await reader.readexactly(length))
                if isinstance(message, Leave):
                    return
                self._obey(message)
        except (OSError, EOFError):
            return
        finally:
            beating.cancel()
            self._writer.close()

    def _obey(self, message: ToAgent) -> None:
        if isinstance(message, Welcome):
            self._say(NodeReady(slots=self._slots, address=LOOPBACK_ADDRESS))
        elif isinstance(message, PrepareRanks):
            self._say(RanksPrepared(launch=message.launch, store_port=1))
        elif isinstance(message, StartRanks):
            self._ranks = message.share.ranks
            for rank in self._ranks:
                self._say(RankJoined(launch=message.launch, rank=rank, pid=os.getpid()))
        elif isinstance(message, ToRanks):
            self._answer(message)
        elif isinstance(message, ForwardSignal) and message.signal == signal.SIGKILL:
            self._say(RankGone(launch=message.launch, rank=message.rank, code=-signal.SIGKILL))

    def _answer(self, message: ToRanks) -> None:
        for rank in self._ranks:
            asked = decode_from_driver(message.data)  # as each rank does
            if not (isinstance(asked, Envelope) and isinstance(asked.request, Ping | Shutdown)):
                return
            answer = encode(Answer(number=asked.number, result=Done()))
            self._say(RankSent(launch=message.launch, rank=rank, data=answer))
            if isinstance(asked.request, Shutdown):
                self._say(RankGone(launch=message.launch, rank=rank, code=0))

    def _say(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(encode(message)))

    async def _beat(self) -> None:
        while True:
            self._say(Alive())
            await asyncio.sleep(ALIVE_SECONDS)


async def _serve_all(driver: str, token: str, nodes: list[str], slots: int) -> None:
    await asyncio.gather(*(SimulatedAgent(node, slots).serve(driver, token) for node in nodes))


def main() -> None:
    """Serve the driver until the run ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.scale_agents", description=__doc__)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--nodes", nargs="+", required=True)
    arguments = parser.parse_args()
    token = sys.stdin.readline().strip()
    print(READY, flush=True)
    if sys.stdin.readline():
        asyncio.run(_serve_all(arguments.driver, token, arguments.nodes, arguments.slots))


if __name__ == "__main__":
    main()
