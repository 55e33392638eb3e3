"""Which nodes a run gets, and which take the places of lost ones. Agents that start no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.nodes import FakeAgent, fake_agent, hub
from trial_core.errors import LaunchError, Stopped
from trial_core.nodes.engine import AgentEnded, Engine, Gang, Node, NodeRequest
from trial_core.nodes.hub import Hub
from trial_core.nodes.join_engine import JoinEngine
from trial_core.nodes.join_token import new_token
from trial_core.nodes.node_messages import Refused
from trial_core.nodes.node_pool import NodePool

TOKEN = new_token()


class FakeEngine:
    """An engine whose agents join at once.

    Args:
        slots: of its nodes at first, and then of the one that may replace one of them.

    Attributes:
        agents: those that it has started, by the name of their node.
        dies: the agents of these nodes end instead of joining.
    """

    name = "fake"

    def __init__(self, hub: Hub, slots: Sequence[int], spare: int | None = None) -> None:
        self._hub = hub
        self._spare = spare
        self._stack = ExitStack()
        self.nodes = [Node(f"node-{number}", count) for number, count in enumerate(slots)]
        self.agents: dict[str, FakeAgent] = {}
        self.dies: set[str] = set()
        self.told: list[AgentEnded] = []
        self.is_released = False

    def place(self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]) -> Gang:
        return self

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert given["--driver"] == self._hub.address
        assert (given["--node"], given["--slots"]) == (node.name, str(node.slots))
        if node.name in self.dies:
            self.told.append(AgentEnded(node.name, "exit code 3: no such module"))
            return
        joined = fake_agent(self._hub, token, slots=node.slots, node=node.name)
        self.agents[node.name] = self._stack.enter_context(joined)

    def ended(self) -> Sequence[AgentEnded]:
        told, self.told = self.told, []
        return told

    def replace(self, lost: Node, seconds: float, should_abort: Callable[[], bool]) -> Node | None:
        self.nodes.remove(lost)
        if self._spare is None:
            return None
        new, self._spare = Node(f"{lost.name}-again", self._spare), None
        self.nodes.append(new)
        return new

    def release(self) -> None:
        self.is_released = True
        self._stack.close()


@contextmanager
def pool(engine: Engine, driver: Hub, slots: int, seconds: float = 60.0) -> Iterator[NodePool]:
    with NodePool(engine, driver, NodeRequest(slots), TOKEN, seconds) as opened:
        yield opened


def names(pool: NodePool) -> list[str]:
    return [agent.name for agent in pool.gather()]


@pytest.fixture
def driver() -> Iterator[Hub]:
    with hub(token=TOKEN) as opened:
        yield opened


def test_a_lost_node_is_replaced_and_the_others_keep_their_places(driver: Hub) -> None:
    """At the end the engine gets all nodes back."""
    engine = FakeEngine(driver, [2, 2, 2], spare=2)
    with pool(engine, driver, 6) as nodes:
        before = names(nodes)
        assert sorted(before) == ["node-0", "node-1", "node-2"]
        lost = before[1]
        engine.agents[lost].close()
        with driver.changed:
            driver.changed.wait_for(lambda: driver.agents[lost].lost is not None, 60)
        assert names(nodes) == [before[0], f"{lost}-again", before[2]]
    assert engine.is_released


def test_a_node_that_the_engine_reports_lost_is_replaced(driver: Hub) -> None:
    """Also if its agent still answers, as on a node that Slurm drains."""
    engine = FakeEngine(driver, [1, 1], spare=1)
    with pool(engine, driver, 2) as nodes:
        first, second = names(nodes)
        engine.told.append(AgentEnded(first, "the node is down"))
        assert names(nodes) == [f"{first}-again", second]


def test_without_another_node_the_run_fails(driver: Hub) -> None:
    """And says which node was lost, and why."""
    engine = FakeEngine(driver, [1, 1])
    with pool(engine, driver, 2) as nodes:
        first, _ = names(nodes)
        engine.told.append(AgentEnded(first, "the node is down"))
        with pytest.raises(
            LaunchError, match=f"fake has no other node with 1 slot in place of {first}, which is "
            r"lost \(the node is down\), within 60 s",
        ):  # fmt: skip
            nodes.gather()


def test_an_agent_that_never_joins_fails_the_run(driver: Hub) -> None:
    """With what the engine knows: another node would probably fare the same."""
    engine = FakeEngine(driver, [1, 1], spare=1)
    engine.dies = {"node-1"}
    with pool(engine, driver, 2) as nodes, pytest.raises(
        LaunchError, match="agent of node node-1 has not joined: exit code 3: no such module"
    ):  # fmt: skip
        nodes.gather()


def test_nodes_that_join_by_hand(driver: Hub) -> None:
    """The run takes as many as it needs, with unequal slots; the next one is a spare."""
    with (
        fake_agent(driver, TOKEN, slots=2, host="big"),
        fake_agent(driver, TOKEN, slots=1, host="small") as small,
        pool(JoinEngine(), driver, 3) as nodes,
    ):
        told: list[str] = []
        assert {agent.name for agent in nodes.gather(on_activity=told.append)} == {"big", "small"}
        assert told == ["waiting for nodes of join: 0 nodes with 0 of 3 slots there"]
        small.close()
        with fake_agent(driver, TOKEN, slots=1, host="spare"):
            assert set(names(nodes)) == {"big", "spare"}


def test_too_few_nodes(driver: Hub) -> None:
    """The error says what there is, and what to do. A stop ends the wait."""
    with (
        fake_agent(driver, TOKEN, slots=2, host="big"),
        pool(JoinEngine(), driver, 3, seconds=0.5) as nodes,
    ):
        with pytest.raises(Stopped, match="stopped while it waited for its nodes"):
            nodes.gather(should_abort=lambda: True)
        with pytest.raises(
            LaunchError, match=r"not enough nodes within 0\.5 s: 1 node with 2 of 3 slots there; "
            "start more, or reduce resources.slots_per_trial",
        ):  # fmt: skip
            nodes.gather()


def test_a_node_that_is_refused_is_not_needed(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """A stray one, whenever it has tried to join, does not end a run that has enough nodes."""
    with fake_agent(driver, TOKEN), pool(JoinEngine(), driver, 1) as nodes:
        assert names(nodes) == ["here"]
        stray = FakeAgent(driver.address, TOKEN, host="stray", versions={"trialflow": "0"})
        assert isinstance(stray.next(), Refused)
        assert names(nodes) == ["here"]
        stray.close()
    assert "node stray is refused" in caplog.text


def test_a_node_that_is_refused_fails_the_run(driver: Hub) -> None:
    """It would never have enough nodes."""
    with pool(JoinEngine(), driver, 1) as nodes:
        other = FakeAgent(driver.address, TOKEN, versions={"trialflow": "0"})
        with pytest.raises(LaunchError, match="node here is refused: it has trialflow 0 instead"):
            nodes.gather()
        other.close()
