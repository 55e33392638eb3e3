"""What a node finds out about its storage and other nodes, and what the driver makes of it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpus import fake_gpus
from tests.support.nodes import LOOPBACK
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import LaunchError
from trial_core.processes.nodes.examination import Examination, check_storage
from trial_core.processes.nodes.node_messages import (
    Examine,
    Examined,
    ListeningNode,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
)


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
    found = examination.answer(Examine(environment={}), LOOPBACK)
    assert isinstance(found, Examined)
    assert isinstance(found.listening, ListeningNode)
    with socket.create_server((LOOPBACK, 0)) as closed:
        closed_port = closed.getsockname()[1]
    nodes = {
        "b": found.listening,
        "c": ListeningNode(LOOPBACK, found.listening.port, "hello, this is node c"),
        "d": ListeningNode(LOOPBACK, closed_port, found.listening.greeting),
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
    found = examination.answer(Examine(environment={}), LOOPBACK)
    assert isinstance(found, Examined)
    assert found.accelerators == "2 × cuda (Some GPU, driver 570.1)"
    assert "computes on the CPU only" in str(found.accelerator_problem)


def test_an_address_that_is_not_this_machines(examination: Examination) -> None:
    """The node says that it cannot listen there."""
    found = examination.answer(Examine(environment={}), "192.0.2.1")
    assert isinstance(found, Examined)
    assert isinstance(found.listening, str)


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
    if stored is not None:
        storage.write("probes/doctor/of-the-driver", stored)
    digest = f"sha256:{hashlib.sha256(b'expected').hexdigest()}"
    entry = FileEntry(path="of-the-driver", size_bytes=8, digest=digest, rank=0)
    question = TryStorage(storage=storage.spec, folder="probes/doctor", object=entry)
    tried = examination.answer(question, LOOPBACK)
    assert isinstance(tried, StorageTried)
    assert (tried.problem is None) == (expected is None)
    assert expected is None or expected in str(tried.problem)
    names = names_in(tmp_path / place)
    assert len(names) == (stored is not None) + (expected is None)
    assert ("of-the-driver" in names) == (stored is not None)


def test_an_option_that_this_nodes_packages_do_not_know_is_a_launch_error() -> None:
    """They may be of another version than the driver's."""
    spec = StorageSpec("s3://bucket/x", {"nonsense": 1})
    with pytest.raises(LaunchError, match=r"cannot use the storage s3://bucket/x: .*nonsense"):
        check_storage(spec, "attempts/t/000001.json")
