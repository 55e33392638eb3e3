"""A registry whose writers are killed at every request: it is consistent, and can be written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid as uuids
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Fault, Plan, Seen
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server
from tests.trial_core.models.helpers import (
    MODEL,
    DyingStorage,
    Killed,
    aliases,
    check_log,
    commit,
    held_versions,
    kept_versions,
    new_registry,
    prune_all,
    register,
)
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.models.registry import Registry

ROOT = Path(__file__).parents[3]
BEFORE = (2, 1)


@dataclass(frozen=True)
class Operation:
    """A change of the registry.

    Attributes:
        after: champion and previous once it is done.
    """

    run: Callable[[CheckpointStore], object]
    after: tuple[int, int]


def _register(store: CheckpointStore) -> object:
    return register(store, max(store.list(), key=_batches))


def _batches(manifest: Manifest) -> int:
    return manifest.progress.batches_trained


OPERATIONS = {
    "promote": Operation(lambda store: Registry(store).promote(MODEL, 3), (3, 2)),
    "promote previous": Operation(lambda store: Registry(store).promote(MODEL, 1), (1, 2)),
    "rollback": Operation(lambda store: Registry(store).rollback(MODEL), (1, 2)),
    "register": Operation(_register, BEFORE),
}
each_operation = pytest.mark.parametrize("name", list(OPERATIONS))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four versions, the second champion, the first previous; and an unregistered checkpoint."""
    folder = tmp_path_factory.mktemp("registry") / "storage"
    store = CheckpointStore(str(folder))
    registry = new_registry(store, 4)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2)
    commit(store, 5)
    return folder


@contextmanager
def copied(template: Path, folder: Path) -> Iterator[Path]:
    """A copy of the template, deleted afterwards."""
    copy = folder / uuids.uuid4().hex
    shutil.copytree(template, copy)
    yield copy
    shutil.rmtree(copy)


def check(store: CheckpointStore, operation: Operation) -> bool:
    """Check the registry after a kill, and writing to it. Whether the operation is done."""
    registry = Registry(store)
    seen = aliases(registry)
    assert seen in (BEFORE, operation.after)
    check_log(registry.moves(MODEL))
    versions = registry.versions(MODEL)
    assert [version.number for version in versions] == list(range(1, len(versions) + 1))
    manifests = {manifest.uuid: manifest for manifest in store.list()}
    for number in seen:
        store.verify(registry.version(MODEL, number or 0).checkpoint)
    fourth = manifests[registry.version(MODEL, 4).checkpoint]
    registry.register(MODEL, fourth, metric=None, smaller_is_better=True, value=None)
    assert register(store, max(manifests.values(), key=_batches)).number == 5
    assert len(registry.versions(MODEL)) == 5
    registry.promote(MODEL, 4, why="after the kill", expected_champion=seen[0])
    assert aliases(registry) == (4, seen[0])
    assert held_versions(registry) == {4, seen[0]}
    prune_all(store)
    assert kept_versions(store) == {4, seen[0]}
    check_log(registry.moves(MODEL))
    return seen == operation.after


@pytest.mark.parametrize(
    "name",
    ["promote"]
    + [
        pytest.param(name, marks=pytest.mark.long)
        for name in ("register", "promote previous", "rollback")
    ],
)
def test_killed_after_any_request(name: str, template: Path, tmp_path: Path) -> None:
    """The operation is done or not done; champion and previous are intact and never pruned; the
    next promotion succeeds and removes obsolete holds."""
    operation, outcomes = OPERATIONS[name], []
    writes = _writes(operation, template, tmp_path)
    for nth in range(max(writes) + 1):
        with copied(template, tmp_path) as folder:
            store = CheckpointStore(str(folder))
            store.storage = DyingStorage(store.storage, nth)  # type: ignore[assignment]
            with pytest.raises(Killed):
                operation.run(store)
            if nth in writes:
                _prune_copy(folder)
            outcomes.append(check(CheckpointStore(str(folder)), operation))
    assert outcomes[-1]
    assert name == "register" or (not outcomes[0] and sorted(outcomes) == outcomes)


def _prune_copy(folder: Path) -> None:
    """A prune right after the kill deletes neither champion nor previous."""
    with copied(folder, folder.parent) as copy:
        store = CheckpointStore(str(copy))
        prune_all(store)
        assert {each for each in aliases(Registry(store)) if each} <= kept_versions(store)


class DyingPlan(Plan):
    """Kills the process at the `nth` operation: before or after it."""

    def __init__(self, nth: int, how: str) -> None:
        super().__init__()
        self._nth, self._how = nth, how

    def next(self, client: str, method: str, key: str) -> Seen:
        seen = super().next(client, method, key)
        if seen.index > self._nth or (seen.index == self._nth and self._how == "before"):
            raise Killed
        if seen.index < self._nth:
            return seen
        return Seen(seen.index, client, method, key, Fault("lose reply"))


def _at_operations(
    name: str, new_plan: Callable[[int], Plan], step: int, template: Path, tmp_path: Path
) -> None:
    """On a file system of fsspec, run an operation with a fault at every `step`-th storage
    operation, and check the registry."""
    operation, nth, is_complete = OPERATIONS[name], 0, False
    while not is_complete:
        with copied(template, tmp_path) as folder:
            root, plan = uuids.uuid4().hex, new_plan(nth)
            with planned(root, plan), suppress(Killed, StorageError):
                operation.run(CheckpointStore(f"faulty://{root}{folder}"))
            is_complete = len(plan.seen) <= nth  # the operation ended before the fault
            with planned(root, Plan()):
                is_done = check(CheckpointStore(f"faulty://{root}{folder}"), operation)
            assert is_done or not is_complete
        nth += step
    assert nth > 20


@pytest.mark.long
@pytest.mark.parametrize("how", ["before", "after"])
@each_operation
def test_killed_at_any_operation(name: str, how: str, template: Path, tmp_path: Path) -> None:
    """The same at each storage operation."""
    _at_operations(name, lambda nth: DyingPlan(nth, how), 1, template, tmp_path)


def test_a_lost_reply_is_no_conflict(template: Path, tmp_path: Path) -> None:
    """The operation succeeds, or fails with a StorageError."""

    def lose_reply(nth: int) -> Plan:
        return Plan(Fault("lose reply", first=nth, byte=20))

    _at_operations("promote", lose_reply, 5, template, tmp_path)


@pytest.mark.long
@each_operation
@pytest.mark.parametrize("kind", ["500", "503", "cut request", "lose reply"])
def test_a_fault_at_any_operation(name: str, kind: Any, template: Path, tmp_path: Path) -> None:
    """The same for every kind of fault at each storage operation."""
    _at_operations(name, lambda nth: Plan(Fault(kind, first=nth, byte=20)), 1, template, tmp_path)


def test_a_reply_lost_by_s3(moto_s3: S3Server) -> None:
    """The client retries and learns that the key is taken, by itself: that is no conflict."""
    with faulty_s3(moto_s3) as endpoint:
        server = endpoint.server()
        store = CheckpointStore(server.new_bucket(), server.options)
        plan = endpoint.new_plan(Fault("lose reply", method="PUT", key="/moves/"))
        registry = new_registry(store, 2)
        registry.promote(MODEL, 1)
        registry.promote(MODEL, 2)
        assert plan.has_struck
    assert len(plan.struck()) == 1


KILLED = """
import os, signal, sys
from tests.trial_core.models.helpers import DyingStorage
from tests.trial_core.models.test_killed_writers import OPERATIONS
from trial_core.checkpoint.store import CheckpointStore

class KilledStorage(DyingStorage):
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

folder, name, nth = sys.argv[1:]
store = CheckpointStore(folder)
store.storage = KilledStorage(store.storage, int(nth))
OPERATIONS[name].run(store)
"""


@pytest.mark.long
def test_sigkill(template: Path, tmp_path: Path) -> None:
    """A real SIGKILL of a promoting process, after the hold and before the move."""
    operation = OPERATIONS["promote"]
    nth = _writes(operation, template, tmp_path)[0]
    with copied(template, tmp_path) as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), "promote", str(nth)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL
        assert not check(CheckpointStore(str(folder)), operation)


def _writes(operation: Operation, template: Path, tmp_path: Path) -> list[int]:
    """Which of the operation's requests are writes."""
    found: list[int] = []
    with copied(template, tmp_path) as folder:
        store = CheckpointStore(str(folder))
        requests: list[str] = []

        class CountingStorage(DyingStorage):
            def __getattr__(self, name: str) -> Any:
                attribute = super().__getattr__(name)
                if name in ("read", "sizes"):
                    requests.append(name)
                elif name in ("create", "write", "remove"):
                    requests.append(name)
                    found.append(len(requests))
                return attribute

        store.storage = CountingStorage(store.storage, 10**6)  # type: ignore[assignment]
        operation.run(store)
    return found
