"""Several who move one alias, or register, at the same moment: one of them wins, and all know."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Plan
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server
from tests.trial_core.models.helpers import MODEL, commit, new_registry, register
from tests.trial_core.models.racing import processes, race, threads
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry


@dataclass
class Place:
    """A storage that several open for themselves.

    Attributes:
        has_conditional_writes: whether it has, so that no lock is needed.
        rounds: how many races to run there: a server takes its time.
    """

    url: str
    options: dict[str, Any]
    has_conditional_writes: bool = True
    rounds: int = 20

    def open(self) -> CheckpointStore:
        """One's own way to it."""
        return CheckpointStore(self.url, self.options)


@pytest.fixture
def ceph(request: pytest.FixtureRequest) -> Place:
    server: S3Server = request.getfixturevalue("ceph_s3")
    return Place(f"{server.new_bucket()}/folder", server.options, rounds=4)


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "storage"), {})


@pytest.fixture
def heedless(moto_s3: S3Server) -> Iterator[Place]:
    """S3 as of a server that writes whatever the condition is."""
    with faulty_s3(moto_s3) as endpoint:
        endpoint.ignored = frozenset({"if-none-match"})
        server = endpoint.server()
        yield Place(f"{server.new_bucket()}/folder", server.options, False, rounds=4)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Place]:
    """A file system that is none of those that we know by name."""
    with planned(tmp_path.name, Plan()):
        yield Place(f"faulty://{tmp_path.name}{tmp_path}/storage", {}, False)


@pytest.fixture
def linkless(disk: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A disk without hard links."""

    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    return Place(disk.url, disk.options, False)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Each of them; see the parameters."""
    found: Place = request.getfixturevalue(request.param)
    return found


each_place = pytest.mark.parametrize(
    "place",
    ["disk", pytest.param("ceph", marks=pytest.mark.gateway), "heedless", "linkless", "other"],
    indirect=True,
)
each_shared_place = pytest.mark.parametrize(
    "place",
    ["disk", pytest.param("ceph", marks=pytest.mark.gateway), "heedless"],
    indirect=True,
)


@each_place
def test_threads_that_promote_at_once(place: Place) -> None:
    """One of two wins each round, by the storage's conditional writes or by the lock; the other is
    told by whom; no number is left out, and previous is who was champion before."""
    assert place.open().storage.has_conditional_writes() is place.has_conditional_writes
    new_registry(place.open(), 3)
    with threads([place.open(), place.open()]) as promote:
        race(place.open(), promote, 2, place.rounds)


@each_shared_place
def test_processes_that_promote_at_once(place: Place) -> None:
    """As threads."""
    new_registry(place.open(), 3)
    with processes(place.url, place.options, 2) as promote:
        race(place.open(), promote, 2, place.rounds)


@pytest.mark.long
@each_place
def test_many_threads_that_promote_at_once(place: Place) -> None:
    """One of seven wins each round."""
    new_registry(place.open(), 8)
    with threads([place.open() for _ in range(7)]) as promote:
        race(place.open(), promote, 7, 20)


@pytest.mark.long
@each_shared_place
def test_many_rounds_of_processes(place: Place) -> None:
    """One of three wins each round."""
    new_registry(place.open(), 4)
    with processes(place.url, place.options, 3) as promote:
        race(place.open(), promote, 3, 100)


def test_threads_that_promote_in_memory(store_in_memory: CheckpointStore) -> None:
    """Which is shared by all that opens it."""
    new_registry(store_in_memory, 3)
    with threads([CheckpointStore(store_in_memory.url) for _ in range(2)]) as promote:
        race(store_in_memory, promote, 2, 20)


@each_place
def test_checkpoints_that_are_registered_at_once(place: Place) -> None:
    """Each gets a number of its own, also where two register the same one; none is left out."""
    store = place.open()
    manifests = [commit(store, batches) for batches in range(4)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda each: register(place.open(), each), [*manifests, *manifests]))
    versions = Registry(store).versions(MODEL)
    assert [version.number for version in versions] == [1, 2, 3, 4]
    assert {version.checkpoint for version in versions} == {each.uuid for each in manifests}
    assert made[:4] == made[4:]
