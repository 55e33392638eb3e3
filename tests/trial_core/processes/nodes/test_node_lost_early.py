"""A node that is lost while its ranks are being launched. Agents that start no ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import FakeAgent, fake_agent, hub
from trial_core.checkpoint.store import StorageSpec
from trial_core.errors import RankFailed, Stopped
from trial_core.processes.nodes.hub import Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_launcher import NodeCode, launch_on_nodes
from trial_core.processes.nodes.node_messages import (
    EndRanks,
    PrepareRanks,
    RanksNotStarted,
    RanksPrepared,
    StartRanks,
)
from trial_core.processes.slots.slot_group import SlotGroup

TOKEN = new_token()


@pytest.fixture
def driver() -> Iterator[Hub]:
    with hub(token=TOKEN) as opened:
        yield opened


def launch(driver: Hub, folder: Path, **more: Any) -> SlotGroup:
    with driver.changed:
        assert driver.changed.wait_for(lambda: len(driver.agents) == 2, 60)
    agents = [driver.agents[name] for name in ("first", "second")]
    storage = StorageSpec(url="file:///nowhere", options={})
    launcher = partial(launch_on_nodes, agents, NodeCode(None, folder), storage, "key")
    return SlotGroup(2, working_dir=folder, log_dir=folder / "logs", launcher=launcher, **more)


@pytest.mark.parametrize("stage", ["preparing", "starting"])
def test_a_node_that_is_lost_before_its_ranks_have_joined(
    driver: Hub, tmp_path: Path, stage: str
) -> None:
    """The failure is one after which a run starts its ranks again. Nothing waits for the ranks."""
    with (
        fake_agent(driver, TOKEN, host="first") as first,
        fake_agent(driver, TOKEN, host="second") as second,
    ):

        def answer(agent: FakeAgent) -> None:
            prepare = agent.next()
            assert isinstance(prepare, PrepareRanks)
            if stage == "preparing" and agent is second:
                second.close()
                return
            agent.say(RanksPrepared(launch=prepare.launch, store_port=1))
            if stage == "starting" and agent is second:
                assert isinstance(second.next(), StartRanks)
                second.close()
                # Those of the other node were never forked, either.
                first.say(RanksNotStarted(launch=prepare.launch, why="no memory"))

        threads = [threading.Thread(target=answer, args=(each,)) for each in (first, second)]
        for thread in threads:
            thread.start()
        with pytest.raises(RankFailed) as failure:
            launch(driver, tmp_path)
        for thread in threads:
            thread.join()
        assert failure.value.node_lost is not None
        assert failure.value.during == "its start"
        told = [first.next()]
        while not isinstance(told[-1], EndRanks):
            told.append(first.next())


def test_a_stop_while_nodes_get_ready(driver: Hub, tmp_path: Path) -> None:
    """A node that does not answer does not delay it."""
    with (
        fake_agent(driver, TOKEN, host="first"),
        fake_agent(driver, TOKEN, host="second"),
        pytest.raises(Stopped, match="stopped while its nodes got ready"),
    ):
        launch(driver, tmp_path, should_abort=lambda: True)
