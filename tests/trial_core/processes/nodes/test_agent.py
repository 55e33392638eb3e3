"""The agent of a node: what it passes on, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nodes import DEADLINE_SECONDS, Agents, hub
from tests.support.waiting import until
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialflowError
from trial_core.messages import Message, encode
from trial_core.processes.nodes import agent as agent_module
from trial_core.processes.nodes.agent import LOG_BYTES, Agent, RanksHere
from trial_core.processes.nodes.agent_main import node_folder
from trial_core.processes.nodes.node_messages import (
    ForwardSignal,
    FromAgent,
    Leave,
    PrepareRanks,
    RankGone,
    RankLogged,
    StartRanks,
    ToRanks,
    TryStorage,
    decode_from_agent,
)
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.framing import HEADER, frame
from trial_core.processes.slots.launcher import MachineShare

KEY = "attempts/toy/000001.json"


class StubRank:
    """A rank of the agent, which writes only a log."""

    rank = 0
    pid = None

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path


class StubConnection:
    """An agent's connection to its driver, which takes more only when the test allows it."""

    def __init__(self) -> None:
        self.sent: list[FromAgent] = []
        self.can_take_more = asyncio.Event()

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.sent.append(decode_from_agent(data[HEADER.size :]))

    async def drain(self) -> None:
        await self.can_take_more.wait()


def test_a_long_log_is_sent_piece_by_piece_before_its_ranks_end_is_told(tmp_path: Path) -> None:
    """The next piece is read when the driver has taken the last one; the loop serves others."""
    log = b"".join(b"line %d\n" % number for number in range(10**5))
    assert len(log) > 4 * LOG_BYTES
    rank: Any = StubRank(tmp_path / "rank-0.log")
    rank.log_path.write_bytes(log)

    async def end_a_rank() -> StubConnection:
        agent, driver = Agent(tmp_path, ForkServer()), StubConnection()
        agent._loop, agent._writer = asyncio.get_running_loop(), driver
        agent._rank_ended(RanksHere(1, tmp_path, tmp_path, {}, None, [rank]), 0, 7)
        for _ in range(10):
            await asyncio.sleep(0)
        assert [type(each) for each in driver.sent] == [RankLogged]
        driver.can_take_more.set()
        while agent._tasks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return driver

    *pieces, end = asyncio.run(end_a_rank()).sent
    assert end == RankGone(launch=1, rank=0, code=7)
    sent = [piece.data for piece in pieces if isinstance(piece, RankLogged)]
    assert b"".join(sent) == log
    assert max(map(len, sent)) == LOG_BYTES


def test_a_signal_reaches_its_rank_and_a_launch_ends_its_ranks(tmp_path: Path) -> None:
    """A signal for another launch, whose ranks are gone, reaches none."""
    got: list[Any] = []
    rank: Any = SimpleNamespace(
        rank=1, signal=got.append, kill=lambda: got.append("killed"), wait=lambda seconds: None
    )
    agent = Agent(tmp_path, ForkServer())
    agent._ranks = RanksHere(2, tmp_path, tmp_path, {}, None, [rank])
    for launch, signal_number in ((1, signal.SIGTERM), (2, signal.SIGUSR1), (2, signal.SIGKILL)):
        agent._carry_out(ForwardSignal(launch=launch, rank=1, signal=signal_number))
    agent._carry_out(ForwardSignal(launch=2, rank=0, signal=signal.SIGTERM))
    assert got == [signal.SIGUSR1, signal.SIGKILL]
    agent._end_ranks()
    assert got[2:] == ["killed"]


def test_what_the_driver_sends_while_ranks_start_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks may have joined before the agent has noted that it has started them."""
    passed_on: list[bytes] = []
    may_start = threading.Event()
    started: Any = SimpleNamespace(send_encoded=passed_on.append, close=lambda: None)

    def launch(*_: Any) -> Any:
        assert may_start.wait(DEADLINE_SECONDS)
        return started

    monkeypatch.setattr(agent_module, "launch_here", launch)
    start = StartRanks(launch=1, share=MachineShare(0, 1, 1, ("127.0.0.1", 1)))
    says = [start, *(ToRanks(launch=1, data=data) for data in (b"first", b"second")), Leave()]

    async def obey() -> None:
        agent, reader = Agent(tmp_path, ForkServer()), asyncio.StreamReader()
        agent._loop = asyncio.get_running_loop()
        agent._ranks = RanksHere(1, tmp_path, tmp_path, {}, None)
        worker = threading.Thread(target=agent._work)
        worker.start()
        agent._heard()
        for message in says:
            reader.feed_data(frame(encode(message)))
        await agent._obey(reader)
        may_start.set()
        agent._orders.put(None)
        worker.join()

    asyncio.run(obey())
    assert passed_on == [b"first", b"second"]


HANGING_AGENT = """
import pathlib, sys, threading
from trial_core.processes.nodes import agent, agent_main
from trial_core.checkpoint.storage.local import LocalStorage

def hang(*_):
    pathlib.Path("hangs").touch()
    threading.Event().wait()

method = sys.argv.pop()
setattr(LocalStorage, method, hang)
agent.END_SECONDS = 0.1
if method == "read_into":
    agent_main.EXIT_SECONDS = 0.1
agent_main.main()
"""


@pytest.mark.parametrize(
    ("question", "hanging", "ends_by", "code"),
    [
        ("PrepareRanks", "exists", "Leave", 0),
        pytest.param("PrepareRanks", "exists", "signals", 1, marks=pytest.mark.long),
        # In a thread for which Python waits.
        pytest.param("TryStorage", "read_into", "Leave", 1, marks=pytest.mark.long),
    ],
)
def test_an_agent_whose_storage_hangs_ends(
    tmp_path: Path, question: str, hanging: str, ends_by: str, code: int
) -> None:
    """As when a file server is away: at the run's end, and at the second signal."""
    store, token = CheckpointStore(f"file://{tmp_path}/store"), "t" * 40
    store.storage.write(KEY, b"{}")
    entry = FileEntry(path="000001.json", size_bytes=2, digest=f"sha256:{0:064}", rank=0)
    asked: Message = TryStorage(storage=store.spec, folder="attempts/toy", object=entry)
    if question == "PrepareRanks":
        asked = PrepareRanks(
            launch=1, environment={}, code_digest=None, code=None, code_folder=str(tmp_path),
            storage=store.spec, storage_key=KEY, hosts_store=False,
        )  # fmt: skip
    program = ("-c", HANGING_AGENT)
    with Agents(tmp_path / "agents") as agents, hub(1, token) as driver:
        agent = agents.start(driver.address, token, "--preload", "none", hanging, program=program)
        (joined,) = until(lambda: driver.agents.values(), "it has joined")
        joined.send(asked)
        until((agents.home(0) / "hangs").exists, "it reads")
        if ends_by == "Leave":
            driver.close()
        else:
            agent.send_signal(signal.SIGTERM)
            until(lambda: joined.draining, "it wants to leave")
            agent.send_signal(signal.SIGTERM)
        assert agent.wait(DEADLINE_SECONDS) == code
        assert f"this node ends, but {question} hangs" in agents.log(0)
        if code == 0:
            assert list(agents.home(0).glob("nodes/*/*")) == []


def test_the_folder_of_an_agent_needs_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have none. Then those of other agents stay, which may live."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    with node_folder() as other:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            with node_folder() as folder:
                assert folder.is_dir()
        assert (folder.exists(), other.exists()) == (False, True)


def test_a_folder_that_cannot_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an agent that was started in a folder of the system."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "file"))
    with pytest.raises(TrialflowError, match="Not a directory; set TRIALFLOW_HOME"), node_folder():
        pass
