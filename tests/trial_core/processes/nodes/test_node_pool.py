"""Which nodes a run gets, and which take the places of lost ones. Agents that start no ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.nodes import FakeAgent, fake_agent, hub
from tests.support.waiting import until
from trial_core.errors import LaunchError, Stopped
from trial_core.processes.nodes import node_pool
from trial_core.processes.nodes.hub import Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_messages import Draining, Leave, Refused
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import (
    AgentEnded,
    Gang,
    GangEvent,
    JoinProvider,
    Node,
    NodeDraining,
    NodeProvider,
    NodeRequest,
)

TOKEN = new_token()
STRAY = {"trialflow": "0"}
"""The versions of a node that is refused."""


class FakeProvider:
    """A provider whose agents join at once.

    Args:
        slots: of its nodes at first.
        spare: of one that it offers later.

    Attributes:
        spare: as above; the nodes are called spare, spare-2, spare-3.
        agents: those that it has started, by the name of their node.
        dies: the agents of these nodes end instead of joining.
        strays: those of these nodes have another version of trialflow, and stay nevertheless.
        given_up: nodes that it got back.
    """

    name = "fake"

    def __init__(self, hub: Hub, slots: Sequence[int], spare: int | None = None) -> None:
        self._hub = hub
        self.spare = spare
        self._spares = 0
        self._stack = ExitStack()
        self.nodes = [Node(f"node-{number}", count) for number, count in enumerate(slots)]
        self.agents: dict[str, FakeAgent] = {}
        self.dies: set[str] = set()
        self.strays: set[str] = set()
        self.told: list[GangEvent] = []
        self.given_up: list[str] = []
        self.is_released = False

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        return self

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert given["--driver"] == self._hub.address
        assert (given["--node"], given["--slots"]) == (node.name, str(node.slots))
        if node.name in self.dies:
            self.told.append(AgentEnded(node.name, "exit code 3: no such module"))
            return
        if node.name in self.strays:
            stray = FakeAgent(self._hub.address, token, node=node.name, versions=STRAY)
            self._stack.callback(stray.close)
            return
        joined = fake_agent(self._hub, token, slots=node.slots, node=node.name)
        self.agents[node.name] = self._stack.enter_context(joined)

    def events(self) -> Sequence[GangEvent]:
        told, self.told = self.told, []
        return told

    def give_up(self, node: Node) -> None:
        self.nodes.remove(node)
        self.given_up.append(node.name)

    def offer(self) -> Node | None:
        if self.spare is None:
            return None
        self._spares += 1
        name = "spare" if self._spares == 1 else f"spare-{self._spares}"
        new, self.spare = Node(name, self.spare), None
        self.nodes.append(new)
        return new

    def release(self) -> None:
        self.is_released = True
        self._stack.close()


@contextmanager
def pool(
    provider: NodeProvider,
    driver: Hub,
    slots: int,
    seconds: float = 60.0,
    min_slots: int | None = None,
    replace_seconds: float = 0.0,
) -> Iterator[NodePool]:
    request = NodeRequest(slots, min_slots or slots)
    with NodePool(provider, driver, request, TOKEN, seconds, replace_seconds) as opened:
        yield opened


def names(pool: NodePool) -> list[str]:
    return [agent.name for agent in pool.gather()]


@pytest.fixture
def driver() -> Iterator[Hub]:
    with hub(token=TOKEN) as opened:
        yield opened


def test_a_lost_node_is_replaced_and_the_others_keep_their_places(driver: Hub) -> None:
    """At the end the provider gets all nodes back."""
    provider = FakeProvider(driver, [2, 2, 2], spare=2)
    with pool(provider, driver, 6) as nodes:
        before = names(nodes)
        assert sorted(before) == ["node-0", "node-1", "node-2"]
        lost = before[1]
        provider.agents[lost].close()
        with driver.changed:
            driver.changed.wait_for(lambda: driver.agents[lost].lost is not None, 60)
        assert names(nodes) == [before[0], "spare", before[2]]
    assert provider.is_released


def test_a_node_that_the_provider_reports_lost_is_replaced(driver: Hub) -> None:
    """Also if its agent still answers, as on a node that Slurm drains."""
    provider = FakeProvider(driver, [1, 1], spare=1)
    with pool(provider, driver, 2) as nodes:
        first, second = names(nodes)
        provider.told.append(AgentEnded(first, "the node is down"))
        assert names(nodes) == ["spare", second]


def test_without_another_node_the_run_fails(driver: Hub) -> None:
    """And says which node was lost, and why."""
    provider = FakeProvider(driver, [1, 1])
    with pool(provider, driver, 2, seconds=0.5) as nodes:
        first, _ = names(nodes)
        provider.told.append(AgentEnded(first, "the node is down"))
        with pytest.raises(
            LaunchError, match="not enough nodes of fake within 0.5 s: 1 node with 1 of 2 slots "
            rf"there; in place of {first} \(the node is down\) came no other; start more",
        ):  # fmt: skip
            nodes.gather()


def test_with_a_range_the_run_continues_with_fewer_nodes(driver: Hub) -> None:
    """And takes another one as soon as there is one, in a launch of its own."""
    provider = FakeProvider(driver, [2, 2, 2])
    with pool(provider, driver, 6, min_slots=3, replace_seconds=60) as nodes:
        first, second, third = names(nodes)
        nodes._replace_seconds = 0
        provider.told.append(AgentEnded(first, "the node is down"))
        left = nodes.gather()
        assert [agent.name for agent in left] == [second, third]
        assert nodes.slots_of(left) == 4
        offers: queue.Queue[str] = queue.Queue()
        with nodes.watching(pytest.fail, offers.put):
            provider.spare = 2
            assert offers.get(timeout=60) == "there are nodes for 6 slots"
        assert names(nodes) == ["spare", second, third]
        provider.told += [AgentEnded(second, "down"), AgentEnded(third, "down")]
        nodes._max_wait_seconds = 0.5
        with pytest.raises(LaunchError, match=r"1 node with 2 of 6 slots \(at least 3\) there"):
            nodes.gather()


def test_an_offered_node_whose_agent_never_joins_ends_no_run_that_has_enough(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """The run takes no more offers for some time, and still notices drains."""
    provider = FakeProvider(driver, [1, 1])
    provider.dies = {"spare"}
    with pool(provider, driver, 2, min_slots=1, replace_seconds=60) as nodes:
        first, second = names(nodes)
        nodes._replace_seconds = 0.5
        provider.spare = 1
        provider.told.append(AgentEnded(first, "the node is down"))
        assert names(nodes) == [second]
        told: queue.Queue[str] = queue.Queue()
        with nodes.watching(told.put, pytest.fail):
            provider.agents[second].say(Draining(why="preempted"))
            assert "will be taken away" in told.get(timeout=60)
    assert "the agent of node spare has not joined: exit code 3" in caplog.text


def test_a_provider_that_fails_ends_no_training(
    driver: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray's library without its cluster: it is logged once, and agents are still heard."""
    provider = FakeProvider(driver, [1])
    with pool(provider, driver, 1) as nodes:
        (only,) = names(nodes)
        told: queue.Queue[str] = queue.Queue()
        asked: queue.Queue[int] = queue.Queue()

        def fail() -> Sequence[GangEvent]:
            asked.put(1)
            raise RuntimeError("the cluster is away")

        monkeypatch.setattr(provider, "events", fail)
        with nodes.watching(told.put, pytest.fail):
            for _ in range(2):
                asked.get(timeout=60)
            provider.agents[only].say(Draining(why="preempted"))
            assert "will be taken away" in told.get(timeout=60)
        monkeypatch.undo()
    assert caplog.text.count("fake cannot be asked about its nodes") == 1


def test_a_refused_node_ends_no_run_that_has_enough(driver: Hub) -> None:
    """While it waits for more nodes than it needs."""
    with (
        fake_agent(driver, TOKEN, host="first"),
        pool(JoinProvider(), driver, 2, min_slots=1, replace_seconds=1) as nodes,
    ):
        with driver.changed:
            assert driver.changed.wait_for(lambda: driver.agents, 60)
        stray = FakeAgent(driver.address, TOKEN, host="stray", versions=STRAY)
        assert isinstance(stray.next(), Refused)
        assert names(nodes) == ["first"]
        stray.close()


def test_a_run_does_not_wait_again_for_more_nodes_than_it_needs(driver: Hub) -> None:
    """Only at its start and after a loss: not for a restart, a taken offer or a refused number."""
    provider = FakeProvider(driver, [2, 2])
    with pool(provider, driver, 8, min_slots=2) as nodes:
        until(lambda: len(nodes.gather()) == 2, "both nodes")
        nodes._replace_seconds = 3600
        assert len(names(nodes)) == 2
        provider.spare = 2
        with nodes.watching(pytest.fail, (offers := queue.Queue[str]()).put):
            assert offers.get(timeout=60) == "there are nodes for 6 slots"
        assert len(names(nodes)) == 3
        nodes.leave_out(6)
        assert len(names(nodes)) == 2


def test_a_run_goes_back_to_the_nodes_that_have_trained(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """If it cannot be launched with those that it has taken in addition. It takes no more then."""
    provider = FakeProvider(driver, [1])
    with pool(provider, driver, 2, min_slots=1) as nodes:
        (first,) = names(nodes)
        assert not nodes.can_retreat()
        nodes.has_trained()
        provider.spare = 1
        with nodes.watching(pytest.fail, (offers := queue.Queue[str]()).put):
            offers.get(timeout=60)
        assert names(nodes) == [first, "spare"]
        assert nodes.can_retreat()
        nodes.retreat("it sees another storage")
        assert names(nodes) == [first]
        assert isinstance(provider.agents["spare"].next(), Leave)
        assert provider.given_up == ["spare"]
        provider.spare = 1
        assert names(nodes) == [first]
        assert provider.spare == 1
        assert not nodes.can_retreat()
    assert "the run continues without node spare: it sees another storage" in caplog.text
    assert "is lost" not in caplog.text


def test_after_going_back_a_run_has_no_more_slots_than_it_has_then(driver: Hub) -> None:
    """Also if fewer nodes are left than have trained."""
    provider = FakeProvider(driver, [1, 1])
    with pool(provider, driver, 2, min_slots=1) as nodes:
        until(lambda: len(nodes.gather()) == 2, "both nodes")
        nodes.has_trained()
        first, second = names(nodes)
        provider.spare = 1
        provider.told.append(AgentEnded(second, "the node is down"))
        until(lambda: names(nodes) == [first, "spare"], "the spare has joined")
        assert nodes.can_retreat()
        nodes.retreat("it sees another storage")
        provider.spare = 1
        assert names(nodes) == [first]
        assert provider.spare == 1


def test_a_replacement_that_cannot_train_is_left_for_another_one(driver: Hub) -> None:
    """Only one that has come since the run has trained; the others have been fit."""
    provider = FakeProvider(driver, [1, 1], spare=1)
    with pool(provider, driver, 2) as nodes:
        first, second = names(nodes)
        nodes.has_trained()
        provider.told.append(AgentEnded(second, "the node is down"))
        assert names(nodes) == [first, "spare"]
        assert nodes.slots_left == 2
        assert not nodes.can_retreat()
        nodes.leave(first, "it has trained")
        nodes.leave("spare", "its disk is full")
        assert nodes.slots_left == 1
        provider.spare = 1
        assert names(nodes) == [first, "spare-2"]
        assert isinstance(provider.agents["spare"].next(), Leave)
        assert provider.given_up == [second, "spare"]


def test_after_its_first_launch_a_run_waits_for_a_node_that_can_join(
    driver: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days of training are not lost because of one bad replacement."""
    monkeypatch.setattr(node_pool, "OFFER_SECONDS", 0.01)
    provider = FakeProvider(driver, [1, 1], spare=1)
    provider.dies = {"spare"}
    with pool(provider, driver, 2) as nodes, ThreadPoolExecutor() as threads:
        first, second = names(nodes)
        provider.told.append(AgentEnded(second, "the node is down"))
        gathered = threads.submit(names, nodes)
        until(lambda: "node spare has not joined" in caplog.text, "the replacement has failed")
        provider.spare = 1
        assert gathered.result(60) == [first, "spare-2"]
        provider.told.append(AgentEnded(first, "the node is down, too"))
        provider.dies, provider.spare, nodes._max_wait_seconds = {"spare-3"}, 1, 1
        with pytest.raises(
            LaunchError, match=r"in place of .* came no other; the agent of node spare-3 has not "
            "joined: exit code 3",
        ):  # fmt: skip
            nodes.gather()


def test_a_node_that_was_refused_during_training_ends_no_later_wait(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the replacement of a lost node is waited for."""
    with (
        fake_agent(driver, TOKEN, host="first") as first,
        pool(JoinProvider(), driver, 1) as nodes,
        ThreadPoolExecutor() as threads,
    ):
        assert names(nodes) == ["first"]
        with nodes.watching(pytest.fail, pytest.fail):
            stray = FakeAgent(driver.address, TOKEN, host="stray", versions=STRAY)
            assert isinstance(stray.next(), Refused)
            until(lambda: "node stray is refused" in caplog.text, "it is logged")
            stray.close()
        second = FakeAgent(driver.address, TOKEN, host="other", versions=STRAY)
        assert isinstance(second.next(), Refused)
        second.close()
        first.close()
        until(lambda: driver.agents["first"].lost, "its loss is seen")
        gathered = threads.submit(names, nodes)
        until(lambda: "node other is refused" in caplog.text, "it is logged, too")
        with fake_agent(driver, TOKEN, host="third"):
            assert gathered.result(60) == ["third"]


def test_a_node_of_the_provider_that_is_refused_is_given_back(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """Its agent need not end first. It is named once."""
    provider = FakeProvider(driver, [1, 1])
    provider.strays = {"node-0"}
    with pool(provider, driver, 2, min_slots=1) as nodes:
        until(lambda: names(nodes) == ["node-1"], "the other one has joined")
        until(lambda: provider.given_up == ["node-0"], "it is given back")
    (told,) = [record.message for record in caplog.records if "node-0" in record.message]
    assert told.startswith("node node-0 is refused: it has trialflow 0 instead")


def test_a_refused_node_of_the_provider_fails_the_first_launch(driver: Hub) -> None:
    """If there are too few others. The error says why, also if its agent does not end."""
    provider = FakeProvider(driver, [1])
    provider.strays = {"node-0"}
    with (
        pool(provider, driver, 1) as nodes,
        pytest.raises(LaunchError, match="node node-0 is refused: it has trialflow 0 instead"),
    ):
        nodes.gather()


def test_an_agent_that_cannot_start_ends_no_run_that_will_have_enough(driver: Hub) -> None:
    """Although it fails before the others have joined."""
    provider = FakeProvider(driver, [1, 1, 1])
    provider.dies = {"node-0"}
    with pool(provider, driver, 3, min_slots=2) as nodes:
        assert sorted(names(nodes)) == ["node-1", "node-2"]


def test_a_run_waits_for_more_nodes_than_it_needs(driver: Hub) -> None:
    """`replace_seconds`, from when it has enough."""
    with (
        fake_agent(driver, TOKEN, host="first"),
        pool(JoinProvider(), driver, 2, min_slots=1, replace_seconds=60) as nodes,
        ThreadPoolExecutor() as threads,
    ):
        told: queue.Queue[str] = queue.Queue()
        gathered = threads.submit(nodes.gather, on_activity=told.put)
        assert "0 of 2 slots (at least 1)" in told.get(timeout=60)
        with fake_agent(driver, TOKEN, host="second"):
            assert [agent.name for agent in gathered.result(60)] == ["first", "second"]


def test_a_number_of_slots_that_the_trial_refuses_is_left_out(driver: Hub) -> None:
    """The next smaller number of whole nodes follows, down to the least."""
    provider = FakeProvider(driver, [2, 2, 2])
    with pool(provider, driver, 6, min_slots=2, replace_seconds=60) as nodes:
        assert nodes.slots_of(nodes.gather()) == 6
        nodes._replace_seconds = 0
        assert nodes.can_leave_out(6)
        nodes.leave_out(6)
        assert nodes.slots_of(nodes.gather()) == 4
        assert nodes.can_leave_out(4)
        nodes.leave_out(4)
        assert nodes.slots_of(nodes.gather()) == 2
        assert not nodes.can_leave_out(2)


@pytest.mark.parametrize("who", ["provider", "agent"])
def test_a_draining_node_is_left_once_its_ranks_have_saved(driver: Hub, who: str) -> None:
    """The provider's offer for it joins meanwhile."""
    provider = FakeProvider(driver, [1, 1], spare=1)
    with pool(provider, driver, 2) as nodes:
        first, second = names(nodes)
        told: queue.Queue[str] = queue.Queue()
        with nodes.watching(told.put, pytest.fail):
            if who == "provider":
                provider.told.append(NodeDraining(first, "preempted"))
            else:
                provider.agents[first].say(Draining(why="preempted"))
            assert told.get(timeout=60) == f"node {first} (preempted) will be taken away"
        assert driver.agents[first].lost is None
        assert first not in provider.given_up
        assert names(nodes) == ["spare", second]
        assert isinstance(provider.agents[first].next(), Leave)
        assert provider.given_up == [first]


def test_a_node_that_can_stay_is_left_when_there_is_another(driver: Hub) -> None:
    """Slurm drains a node when its jobs have ended: without another node, the run stays there."""
    provider = FakeProvider(driver, [1, 1])
    with pool(provider, driver, 2) as nodes:
        first, second = names(nodes)
        provider.told.append(NodeDraining(first, "Slurm drains it", can_stay=True))
        assert names(nodes) == [first, second]
        told: queue.Queue[str] = queue.Queue()
        with nodes.watching(told.put, pytest.fail):
            provider.spare = 1
            assert told.get(timeout=60) == f"node {first} (Slurm drains it) will be taken away"
        assert names(nodes) == ["spare", second]


def test_a_node_that_the_provider_knows_to_be_down_is_lost_at_once(driver: Hub) -> None:
    """Before its agent has been silent for long; its ranks' launch learns the reason."""
    provider = FakeProvider(driver, [1, 1])
    with pool(provider, driver, 2) as nodes:
        first, _ = nodes.gather()
        whys: queue.Queue[str] = queue.Queue()
        first.on_lost = whys.put
        with nodes.watching(pytest.fail, pytest.fail):
            provider.told.append(AgentEnded(first.name, "Slurm says that it is DOWN"))
            assert whys.get(timeout=60) == "Slurm says that it is DOWN"


def test_a_spare_that_drains_leaves_at_once(driver: Hub) -> None:
    with (
        fake_agent(driver, TOKEN, host="first"),
        pool(JoinProvider(), driver, 1) as nodes,
    ):
        assert names(nodes) == ["first"]
        with fake_agent(driver, TOKEN, host="spare") as spare, nodes.watching(
            pytest.fail, pytest.fail
        ):  # fmt: skip
            spare.say(Draining(why="SIGTERM"))
            assert isinstance(spare.next(), Leave)


def test_an_agent_that_never_joins_fails_the_run(driver: Hub) -> None:
    """With what the provider knows: another node would probably fare the same."""
    provider = FakeProvider(driver, [1, 1], spare=1)
    provider.dies = {"node-1"}
    with pool(provider, driver, 2) as nodes, pytest.raises(
        LaunchError, match="agent of node node-1 has not joined: exit code 3: no such module"
    ):  # fmt: skip
        nodes.gather()


def test_nodes_that_join_by_hand(driver: Hub) -> None:
    """The run takes as many as it needs, with unequal slots; the next one is a spare."""
    with (
        fake_agent(driver, TOKEN, slots=2, host="big"),
        fake_agent(driver, TOKEN, slots=1, host="small") as small,
        pool(JoinProvider(), driver, 3) as nodes,
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
        pool(JoinProvider(), driver, 3, seconds=0.5) as nodes,
    ):
        with pytest.raises(Stopped, match="stopped while it waited for its nodes"):
            nodes.gather(should_abort=lambda: True)
        with pytest.raises(
            LaunchError, match=r"not enough nodes of join within 0\.5 s: 1 node with 2 of 3 slots "
            "there; start more, or reduce resources.slots_per_trial",
        ):  # fmt: skip
            nodes.gather()


def test_a_node_that_is_refused_is_not_needed(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """A stray one, whenever it has tried to join, does not end a run that has enough nodes."""
    with fake_agent(driver, TOKEN), pool(JoinProvider(), driver, 1) as nodes:
        assert names(nodes) == ["here"]
        stray = FakeAgent(driver.address, TOKEN, host="stray", versions=STRAY)
        assert isinstance(stray.next(), Refused)
        assert names(nodes) == ["here"]
        stray.close()
    assert "node stray is refused" in caplog.text


def test_a_node_that_is_refused_fails_the_run(driver: Hub) -> None:
    """It would never have enough nodes."""
    with pool(JoinProvider(), driver, 1) as nodes:
        other = FakeAgent(driver.address, TOKEN, versions=STRAY)
        with pytest.raises(LaunchError, match="node here is refused: it has trialflow 0 instead"):
            nodes.gather()
        other.close()
