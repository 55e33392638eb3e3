"""Concurrent promotions and registrations: one succeeds, on every kind of storage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3 import S3Server
from tests.trial_core.models.helpers import MODEL, commit, new_registry, register
from tests.trial_core.models.promotion_race import processes, race, threads
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry


@dataclass
class Place:
    """A storage that several writers open.

    Attributes:
        rounds: number of races to run.
    """

    url: str
    options: dict[str, Any]
    rounds: int = 20

    def open(self) -> CheckpointStore:
        """A new connection."""
        return CheckpointStore(self.url, self.options)


@pytest.fixture
def ceph(request: pytest.FixtureRequest) -> Place:
    server: S3Server = request.getfixturevalue("ceph_s3")
    return Place(f"{server.new_bucket()}/folder", server.options, rounds=4)


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "storage"), {})


@pytest.fixture
def memory(store_in_memory: CheckpointStore) -> Place:
    return Place(store_in_memory.url, {})


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """The place that the test's parameter names."""
    found: Place = request.getfixturevalue(request.param)
    return found


def places(*names: str, long: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    marks = {
        name: [
            *([pytest.mark.gateway] if name == "ceph" else []),
            *([pytest.mark.long] if name in long else []),
        ]
        for name in names
    }
    params = [pytest.param(name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("place", params, indirect=True)


ALL = ("disk", "ceph", "memory")
SHARED = ("disk", "ceph")


@places(*ALL)
def test_threads_that_promote_at_once(place: Place) -> None:
    """One of two succeeds in each round; the other names it. The log has no gaps, and `previous`
    is the champion before."""
    new_registry(place.open(), 3)
    with threads([place.open(), place.open()]) as promote_all:
        race(place.open(), promote_all, 2, place.rounds)


@places(*SHARED, long=("ceph",))
def test_processes_that_promote_at_once(place: Place) -> None:
    """The same for processes."""
    new_registry(place.open(), 3)
    with processes(place.url, place.options, 2) as promote_all:
        race(place.open(), promote_all, 2, place.rounds)


@pytest.mark.long
@places(*ALL)
def test_many_threads_that_promote_at_once(place: Place) -> None:
    """One of seven succeeds in each round."""
    new_registry(place.open(), 8)
    with threads([place.open() for _ in range(7)]) as promote_all:
        race(place.open(), promote_all, 7, 20)


@places(*ALL, long=("ceph", "memory"))
def test_concurrent_registrations(place: Place) -> None:
    """Each checkpoint gets one number, even if it is registered twice; no number is skipped."""
    store = place.open()
    manifests = [commit(store, batches) for batches in range(4)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda each: register(place.open(), each), [*manifests, *manifests]))
    versions = Registry(store).versions(MODEL)
    assert [version.number for version in versions] == [1, 2, 3, 4]
    assert {version.checkpoint for version in versions} == {each.uuid for each in manifests}
    assert made[:4] == made[4:]
