"""Ranks on two nodes: real agents, real ranks, which import nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.nodes import DEADLINE_SECONDS, Agents, hub
from tests.support.slots import OwnSlots
from trial_core.checkpoint.store import CheckpointStore, StorageSpec
from trial_core.checkpoint.transfer.code_folder import pack_code
from trial_core.errors import LaunchError, RankFailed
from trial_core.messages import Done, Ping
from trial_core.processes.nodes.hub import ConnectedAgent, Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_launcher import NodeCode, launch_on_nodes, shares_of
from trial_core.processes.nodes.node_messages import RankJoined, RankLeft, RankLogged
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import JoinProvider, NodeRequest
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.xdist_group("nodes")

KEY = "claims/trial.json"


class Nodes:
    """A hub and two real agents with one slot each."""

    def __init__(self, driver: Hub, agents: Agents, pool: NodePool, folder: Path) -> None:
        self.driver = driver
        self.agents = agents
        self.pool = pool
        self._folder = folder
        code = folder / "code"
        code.mkdir()
        (code / "model.py").write_text("x = 1")
        self.code = NodeCode(pack_code(code, []).data, code)
        self.store = CheckpointStore(f"file://{folder}/store")
        self.store.storage.write(KEY, b"{}")

    def connected(self) -> list[ConnectedAgent]:
        """The agents of the driver's nodes."""
        return self.pool.gather()

    def launch(
        self, code: NodeCode | None = None, storage: StorageSpec | None = None, **more: Any
    ) -> SlotGroup:
        """Launch two ranks, one on each node."""
        launcher = partial(
            launch_on_nodes, self.connected(), code or self.code, storage or self.store.spec, KEY
        )
        return SlotGroup(
            2, working_dir=self._folder, log_dir=self._folder / "logs", launcher=launcher, **more
        )

    def agent_of(self, pid: int) -> psutil.Process:
        """The agent that has started a rank."""
        return psutil.Process(pid).parents()[1]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes whose ranks import nothing that takes long."""
    token, folder = new_token(), tmp_path_factory.mktemp("nodes")
    with hub(1, token) as driver, Agents(folder) as agents:
        for _ in range(2):
            agents.start(driver.address, token, "--preload", "none")
        with NodePool(JoinProvider(), driver, NodeRequest(2, 2), token, DEADLINE_SECONDS) as pool:
            yield Nodes(driver, agents, pool, folder)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_of_two_nodes_answer(nodes: Nodes) -> None:
    """They start in the code folder, a copy of which each node got, and know their place."""
    with nodes.launch(environment={"COLOUR": "blue"}) as slots:
        assert slots.request(Ping(), Done) == [Done(), Done()]
        first, second = (psutil.Process(pid) for pid in slots.pids)
        for process in (first, second):
            variables = process.environ()
            assert (variables["COLOUR"], variables["LOCAL_WORLD_SIZE"]) == ("blue", "1")
            assert variables["GLOO_SOCKET_IFNAME"] == "lo"
            assert (Path(process.cwd()) / "model.py").read_text() == "x = 1"
        assert first.cwd() != second.cwd()
        assert nodes.agent_of(first.pid) != nodes.agent_of(second.pid)
        ends = [psutil.Process(pid) for pid in slots.pids]
    assert not any(process.is_running() for process in ends)


def test_a_node_speaks_for_its_own_ranks_alone(nodes: Nodes) -> None:
    """What it says of a rank of another node is left out, and that rank still answers."""
    with nodes.launch() as slots:
        connections: Any = slots._connections
        (agent, _), (_, (rank,)) = connections._shares
        about, pids = {"launch": connections._number, "rank": rank}, slots.pids
        agent.on_message(RankJoined(**about, pid=1))
        agent.on_message(RankLogged(**about, data=b"said by another node"))
        agent.on_message(RankLeft(**about, protocol_error="said by another node"))
        assert slots.request(Ping(), Done) == [Done(), Done()]
        assert slots.pids == pids
        assert b"another node" not in connections._ranks[rank].log_path.read_bytes()


def test_a_later_launch_uses_the_same_interpreters(nodes: Nodes) -> None:
    """The fork servers stay, and the code is not sent again."""
    with nodes.launch() as slots:
        before = [psutil.Process(pid).ppid() for pid in slots.pids]
    with nodes.launch() as slots:
        assert [psutil.Process(pid).ppid() for pid in slots.pids] == before


def test_a_node_has_the_process_that_forks_its_ranks_before_they_are_launched(
    tmp_path: Path,
) -> None:
    """So a spare replaces a lost node at once."""
    token = new_token()
    with hub(1, token) as driver, Agents(tmp_path) as agents:
        agent = psutil.Process(agents.start(driver.address, token, "--preload", "none").pid)
        with NodePool(JoinProvider(), driver, NodeRequest(1, 1), token, DEADLINE_SECONDS) as pool:
            (joined,) = pool.gather()
            (waiting,) = agent.children()
            store = CheckpointStore(f"file://{tmp_path}/store")
            store.storage.write(KEY, b"{}")
            launcher = partial(launch_on_nodes, [joined], NodeCode(None, tmp_path), store.spec, KEY)
            with OwnSlots(1, working_dir=tmp_path, launcher=launcher) as slots:
                (rank,) = map(psutil.Process, slots.pids)
                assert rank.parent() == waiting
                assert rank.cwd() == str(tmp_path)


@pytest.mark.long
def test_a_spare_imports_pytorch_while_it_waits(tmp_path: Path) -> None:
    """An agent that has joined, of which nothing was asked yet."""
    token = new_token()
    with hub(1, token) as driver, Agents(tmp_path) as agents:
        agent = psutil.Process(agents.start(driver.address, token).pid)
        wait_until(lambda: any("libtorch" in loaded_by(each) for each in agent.children()))


def loaded_by(process: psutil.Process) -> str:
    """The files that a process has mapped."""
    return Path(f"/proc/{process.pid}/maps").read_text()


def test_a_killed_rank_is_reported_with_its_node_and_log(nodes: Nodes) -> None:
    """And the other node's rank is ended."""
    with nodes.launch() as slots:
        victim, other = (psutil.Process(pid) for pid in slots.pids)
        log = slots.log_dir / "rank-0.log"
        begin = log.stat().st_size
        victim.suspend()  # so that it does not answer
        Path(f"/proc/{victim.pid}/fd/2").write_text("about to die\n")
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(RankFailed) as failure:
            slots.request(Ping(), Done)
    assert (failure.value.rank, failure.value.signal_name) == (0, "SIGKILL")
    assert failure.value.host in {agent.name for agent in nodes.connected()}
    assert "about to die" in log.read_text()[begin:]
    assert "about to die" in failure.value.log_tail
    wait_until(lambda: not other.is_running())


def test_a_rank_makes_progress_when_it_writes(nodes: Nodes) -> None:
    """To its log or to a disk of its node."""
    with nodes.launch() as slots:
        rank = slots._ranks[1]
        before = rank.written_bytes()
        Path(f"/proc/{slots.pids[1]}/fd/2").write_text("working\n")
        wait_until(lambda: rank.written_bytes() > before)
        slots.request(Ping(), Done)


def test_a_node_that_sees_another_storage_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    """As with a folder that is not mounted there. Nothing starts."""
    elsewhere = CheckpointStore(f"file://{tmp_path}/elsewhere").spec
    with pytest.raises(
        LaunchError, match=r"node \S+ cannot start its ranks: this node sees another storage than "
        rf"the driver: .*elsewhere has no {KEY} here",
    ):  # fmt: skip
        nodes.launch(storage=elsewhere)


def test_shared_code_must_be_mounted(nodes: Nodes, tmp_path: Path) -> None:
    """Where it is, the ranks start in it."""
    with nodes.launch(NodeCode(None, tmp_path)) as slots:
        assert {psutil.Process(pid).cwd() for pid in slots.pids} == {str(tmp_path)}
    with pytest.raises(LaunchError, match="there is no code folder /nowhere here, and environm"):
        nodes.launch(NodeCode(None, Path("/nowhere")))


def test_shares_of_unequal_nodes() -> None:
    """In the order of the nodes; the last one may have more slots than it gets ranks."""
    assert shares_of(7, [4, 1, 4]) == [range(4), range(4, 5), range(5, 7)]
    with pytest.raises(LaunchError, match="7 ranks cannot be spread over nodes with 4, 2 slots"):
        shares_of(7, [4, 2])


DRIVER = """
import sys
from pathlib import Path
from tests.support.nodes import Agents, hub
from tests.trial_core.processes.nodes.test_node_launcher import Nodes
from trial_core.messages import Done, Ping
from trial_core.processes.nodes.node_provider import NodeRequest
from trial_core.processes.nodes.node_provider import JoinProvider
from trial_core.processes.nodes.node_pool import NodePool

token, folder = "t" * 40, Path(sys.argv[1])
with hub(1, token) as driver:
    print(driver.address, flush=True)
    pool = NodePool(JoinProvider(), driver, NodeRequest(2, 2), token, 60)
    slots = Nodes(driver, None, pool, folder).launch()
    slots.request(Ping(), Done)
    print(*slots.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["driver", pytest.param("agent", marks=pytest.mark.long)])
def test_what_is_killed_leaves_no_process(tmp_path: Path, victim: str) -> None:
    """SIGKILL of the driver ends all agents with their ranks; that of an agent, its ranks."""
    with (
        Agents(tmp_path / "agents") as agents,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as driver,
    ):  # fmt: skip
        assert driver.stdin is not None
        assert driver.stdout is not None
        address = driver.stdout.readline().strip()
        for _ in range(2):
            agents.start(address, "t" * 40, "--preload", "none")
        ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        if victim == "driver":
            driver.kill()
            wait_until(lambda: not any(rank.is_running() for rank in ranks))
            assert [agent.wait(DEADLINE_SECONDS) for agent in agents.started] == [1, 1]
            assert "this node ends: the driver is gone" in agents.log(0)
            assert list(agents.home(0).glob("nodes/*/*")) == []
        else:
            agent = agents.started[0]
            (own,) = (rank for rank in ranks if agent.pid in {each.pid for each in rank.parents()})
            agent.kill()
            wait_until(lambda: not own.is_running())
            driver.kill()


@pytest.mark.parametrize("has_nohup", [False, True])
def test_an_agent_whose_terminal_is_closed_asks_to_leave(
    tmp_path: Path, has_nohup: bool, request: pytest.FixtureRequest
) -> None:
    """As by SIGTERM. With nohup it stays, until it gets another signal."""
    token, name = "t" * 40, "SIGTERM" if has_nohup else "SIGHUP"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if has_nohup else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with Agents(tmp_path / "agents") as agents:
        with hub(1, token) as driver:
            agent = agents.start(driver.address, token, "--preload", "none")
            wait_until(lambda: bool(driver.agents))
            (joined,) = driver.agents.values()
            agent.send_signal(signal.SIGHUP)
            if has_nohup:
                agent.send_signal(signal.SIGTERM)
            wait_until(lambda: joined.draining is not None)
            assert joined.draining == f"its agent was asked to leave ({name})"
        assert agent.wait(DEADLINE_SECONDS) == 128 + signal.Signals[name]
