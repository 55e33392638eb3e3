"""What a node finds out about its storage and other nodes, and what the driver makes of it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.gpus import fake_gpus
from tests.support.nodes import LOOPBACK, fake_agent, hub
from trial_core.checkpoint.store import CheckpointStore
from trial_core.nodes import questions
from trial_core.nodes.examination import Examination
from trial_core.nodes.join_token import new_token
from trial_core.nodes.node_messages import (
    Examine,
    Examined,
    ListeningNode,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
)

GREETING = "hello, this is node b"


@pytest.fixture
def examination(tmp_path: Path) -> Iterator[Examination]:
    """Of a node on this machine."""
    folder = tmp_path / "node"
    folder.mkdir()
    made = Examination(folder)
    yield made
    made.close()


def test_a_node_is_reached_where_it_listens_and_nowhere_else(examination: Examination) -> None:
    """Another program at its address is not taken for it, as where two nodes have one address."""
    found = examination.answer(Examine(environment={}, greeting=GREETING), LOOPBACK)
    assert isinstance(found, Examined)
    with socket.create_server((LOOPBACK, 0)) as closed:
        closed_port = closed.getsockname()[1]
    nodes = {
        "b": ListeningNode(LOOPBACK, found.port, GREETING),
        "c": ListeningNode(LOOPBACK, found.port, "hello, this is node c"),
        "d": ListeningNode(LOOPBACK, closed_port, GREETING),
    }
    reached = examination.answer(Reach(nodes=nodes), LOOPBACK)
    assert isinstance(reached, Reached)
    assert reached.problems.keys() == {"c", "d"}
    assert reached.problems["c"] == "something else answers at its address and port"
    assert "refused" in reached.problems["d"]


def test_gpus_that_ranks_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examination: Examination
) -> None:
    """They are named with their driver; and why ranks cannot."""
    tool = fake_gpus(tmp_path, monkeypatch, 2, torch_build="cpu")
    query = 'case $1 in --query-gpu*) echo "Some GPU, 570.1"; echo "Some GPU, 570.1"; exit;; esac'
    tool.write_text(tool.read_text().replace("\n", f"\n{query}\n", 1))
    found = examination.answer(Examine(environment={}, greeting=GREETING), LOOPBACK)
    assert isinstance(found, Examined)
    assert found.accelerators == "2 × cuda (Some GPU, driver 570.1)"
    assert "computes on the CPU only" in str(found.accelerator_problem)


def test_an_address_that_is_not_this_machines(examination: Examination) -> None:
    """The node says that it cannot listen there."""
    found = examination.answer(Examine(environment={}, greeting=GREETING), "192.0.2.1")
    assert isinstance(found, Examined)
    assert found.listen_problem is not None


def names_in(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("place", "stored", "expected"),
    [
        ("storage", b"expected", None),
        ("storage", b"anything", "is read here with other bytes than the driver wrote"),
        ("storage", None, "this node sees another storage than the driver: "),
        ("file/below", None, "a file, not a folder: correct the path"),
    ],
    ids=["same", "other bytes", "other storage", "not writable"],
)
def test_a_storage(
    tmp_path: Path, examination: Examination, place: str, stored: bytes | None, expected: str | None
) -> None:
    """Is another one than the driver's, or cannot be written: the problem says so."""
    (tmp_path / "file").touch()
    storage = CheckpointStore(f"file://{tmp_path}/{place}").storage
    key = "probes/of-the-driver"
    if stored is not None:
        storage.write(key, stored)
    tried = examination.answer(
        TryStorage(
            storage=storage.spec, driver_key=key, size_bytes=8,
            digest=f"sha256:{hashlib.sha256(b'expected').hexdigest()}",
            own_key="probes/of-the-node",
        ),
        LOOPBACK,
    )  # fmt: skip
    assert isinstance(tried, StorageTried)
    assert (tried.problem is None) == (expected is None)
    assert expected is None or expected in str(tried.problem)
    assert names_in(tmp_path / place) == ([] if stored is None else ["of-the-driver"])


def test_what_a_lost_node_has_written_is_deleted(tmp_path: Path) -> None:
    """The driver does it; its own object is deleted as well."""
    storage = CheckpointStore(f"file://{tmp_path}/storage").storage
    token = new_token()
    with hub(token=token) as opened, fake_agent(opened, token) as fake:
        with opened.changed:
            opened.changed.wait_for(lambda: opened.agents)
        (agent,) = opened.agents.values()

        def write_and_leave() -> None:
            question = fake.next()
            assert isinstance(question, TryStorage)
            storage.write(question.own_key, b"mine")
            fake.close()

        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(write_and_leave)
            (answer,) = questions.try_storage([agent], storage).values()
            done.result()
    assert isinstance(answer, questions.NoAnswer)
    assert "the node is lost: its agent has closed the connection" in answer.why
    assert names_in(tmp_path / "storage") == []


def test_a_silent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not wait for it without end."""
    monkeypatch.setattr(questions, "EXAMINE_SECONDS", 0.1)
    token = new_token()
    with hub(token=token) as opened, fake_agent(opened, token):
        with opened.changed:
            opened.changed.wait_for(lambda: opened.agents)
        answers, listening = questions.examine([*opened.agents.values()], {})
    assert list(answers.values()) == [questions.NoAnswer("no answer within 0.1 s")]
    assert listening == {}


def test_many_nodes_do_not_all_connect_to_each_other() -> None:
    """The first one and every other one do, both ways, and neighbours."""
    names = [f"node{number}" for number in range(questions.PAIRWISE_NODES + 1)]
    peers = questions.peers_of(names)
    assert peers["node0"] == names[1:]
    assert all("node0" in peers[name] for name in names[1:])
    assert peers["node7"] == ["node0", "node6", "node8"]
    few = questions.peers_of(names[:-1])
    assert all({*others, name} == {*names[:-1]} for name, others in few.items())
