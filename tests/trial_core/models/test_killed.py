"""A registry whose writers are killed at every request: what it says is whole, before and after."""

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
    Dying,
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
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.models.registry import Registry

ROOT = Path(__file__).parents[3]
BEFORE = (2, 1)
LONG_AGO = "20010509T170400000000Z"


@dataclass(frozen=True)
class Deed:
    """What somebody was about when they were killed.

    Attributes:
        after: champion and previous when it is done.
    """

    act: Callable[[CheckpointStore], object]
    after: tuple[int, int]


def _register(store: CheckpointStore) -> object:
    return register(store, max(store.list(), key=_batches))


def _batches(manifest: Manifest) -> int:
    return manifest.progress.batches_trained


DEEDS = {
    "promote": Deed(lambda store: Registry(store).promote(MODEL, 3), (3, 2)),
    "promote previous": Deed(lambda store: Registry(store).promote(MODEL, 1), (1, 2)),
    "rollback": Deed(lambda store: Registry(store).rollback(MODEL), (1, 2)),
    "register": Deed(_register, BEFORE),
}
each_deed = pytest.mark.parametrize("name", list(DEEDS))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four versions, the second champion, the first previous; and one checkpoint more."""
    folder = tmp_path_factory.mktemp("registry") / "storage"
    store = CheckpointStore(str(folder))
    registry = new_registry(store, 4)
    registry.promote(MODEL, 1)
    registry.promote(MODEL, 2)
    commit(store, 5)
    return folder


@contextmanager
def copied(template: Path, folder: Path) -> Iterator[Path]:
    """A copy to do as one likes with."""
    copy = folder / uuids.uuid4().hex
    shutil.copytree(template, copy)
    yield copy
    shutil.rmtree(copy)


def check(store: CheckpointStore, deed: Deed) -> bool:
    """What must hold after somebody was killed, and that others can go on; whether it was done."""
    registry = Registry(store)
    seen = aliases(registry)
    assert seen in (BEFORE, deed.after)
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
    registry.promote(MODEL, 4, why="life goes on", instead_of=seen[0])
    assert aliases(registry) == (4, seen[0])
    assert held_versions(registry) == {4, seen[0]}
    prune_all(store)
    assert kept_versions(store) == {4, seen[0]}
    check_log(registry.moves(MODEL))
    return seen == deed.after


@each_deed
def test_killed_at_any_request(name: str, template: Path, tmp_path: Path) -> None:
    """The move is made whole, or not at all; champion and previous verify and are not pruned; a
    further promotion succeeds, and gives up what the dead one held. To be killed before a request
    and after the one before it leave the same behind."""
    deed, outcomes = DEEDS[name], []
    requests = _writes(deed, template, tmp_path)
    for nth in range(max(requests) + 1):
        with copied(template, tmp_path) as folder:
            store = CheckpointStore(str(folder))
            store.storage = Dying(store.storage, nth)  # type: ignore[assignment]  # the same verbs
            with pytest.raises(Killed):
                deed.act(store)
            if nth in requests:
                _prune_at_once(folder)
            outcomes.append(check(CheckpointStore(str(folder)), deed))
    assert outcomes[-1]
    assert name == "register" or (not outcomes[0] and sorted(outcomes) == outcomes)


def _prune_at_once(folder: Path) -> None:
    """Nothing that the aliases name goes, whatever has been left behind; 4 is promoted later."""
    with copied(folder, folder.parent) as copy:
        store = CheckpointStore(str(copy))
        prune_all(store)
        assert {each for each in aliases(Registry(store)) if each} <= kept_versions(store)


class DyingPlan(Plan):
    """At the operation of that index the process ends: before it, in the middle, or after it."""

    def __init__(self, nth: int, how: str) -> None:
        super().__init__()
        self._nth, self._how = nth, how

    def next(self, client: str, method: str, key: str) -> Seen:
        """As of every plan."""
        seen = super().next(client, method, key)
        if seen.index > self._nth or (seen.index == self._nth and self._how == "before"):
            raise Killed
        if seen.index < self._nth:
            return seen
        fault = Fault("cut request", byte=20) if self._how == "half" else Fault("lose reply")
        return Seen(seen.index, client, method, key, fault)


def _killed_on_another_file_system(
    name: str, how: str, step: int, template: Path, tmp_path: Path
) -> None:
    deed, nth, has_ended = DEEDS[name], 0, False
    while not has_ended:
        with copied(template, tmp_path) as folder:
            root = f"{uuids.uuid4().hex}"
            with planned(root, DyingPlan(nth, how)) as plan, suppress(Killed, StorageError):
                deed.act(CheckpointStore(f"faulty://{root}{folder}"))
            has_ended = len(plan.seen) <= nth
            _let_locks_go_stale(folder)
            with planned(root, Plan()):
                is_done = check(CheckpointStore(f"faulty://{root}{folder}"), deed)
            assert is_done or not has_ended
        nth += step
    assert nth > 20


def _let_locks_go_stale(folder: Path) -> None:
    for path in (folder / layout.locks_folder(MODEL)).glob("*"):
        path.rename(path.with_name(f"{LONG_AGO}-{path.name.partition('-')[2]}"))


each_way = pytest.mark.parametrize("how", ["before", "half", "after"])


@each_way
def test_killed_while_it_has_the_lock(how: str, template: Path, tmp_path: Path) -> None:
    """On a file system that shows half of what is being written: the same holds, once the lock of
    the dead has gone stale."""
    _killed_on_another_file_system("promote", how, 5, template, tmp_path)


@pytest.mark.faults
@each_way
@each_deed
def test_killed_at_any_operation(name: str, how: str, template: Path, tmp_path: Path) -> None:
    """As above, at each operation of each deed."""
    _killed_on_another_file_system(name, how, 1, template, tmp_path)


def _faults_on_another_file_system(
    name: str, kind: Any, step: int, template: Path, tmp_path: Path
) -> None:
    deed, nth, has_ended = DEEDS[name], 0, False
    while not has_ended:
        with copied(template, tmp_path) as folder:
            root = f"{uuids.uuid4().hex}"
            with planned(root, Plan(Fault(kind, first=nth, byte=20))) as plan:
                with suppress(StorageError):
                    deed.act(CheckpointStore(f"faulty://{root}{folder}"))
                has_ended = not plan.has_struck
            _let_locks_go_stale(folder)
            with planned(root, Plan()):
                check(CheckpointStore(f"faulty://{root}{folder}"), deed)
        nth += step
    assert nth > 20


def test_a_reply_that_is_lost_is_no_conflict(template: Path, tmp_path: Path) -> None:
    """Whatever operation's: the storage failed, or nobody notices."""
    _faults_on_another_file_system("promote", "lose reply", 5, template, tmp_path)


@pytest.mark.faults
@each_deed
@pytest.mark.parametrize("kind", ["500", "503", "cut request", "lose reply"])
def test_a_fault_at_any_operation(name: str, kind: str, template: Path, tmp_path: Path) -> None:
    """As above, of every kind, at each operation of each deed."""
    _faults_on_another_file_system(name, kind, 1, template, tmp_path)


@pytest.mark.parametrize("folder", ["moves", "versions"])
def test_a_reply_that_a_server_has_lost(folder: str, moto_s3: S3Server) -> None:
    """The client tries again by itself, and is told that the key is taken: by itself."""
    with faulty_s3(moto_s3) as endpoint:
        server = endpoint.server()
        store = CheckpointStore(server.new_bucket(), server.options)
        plan = endpoint.new_plan(Fault("lose reply", method="PUT", key=f"/{folder}/"))
        registry = new_registry(store, 2)
        registry.promote(MODEL, 1)
        registry.promote(MODEL, 2)
        assert plan.has_struck
    assert len(plan.struck()) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trial_core.models.helpers import Dying
from tests.trial_core.models.test_killed import DEEDS
from trial_core.checkpoint.store import CheckpointStore

class Dead(Dying):
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

folder, name, nth = sys.argv[1:]
store = CheckpointStore(folder)
store.storage = Dead(store.storage, int(nth))
DEEDS[name].act(store)
"""


@pytest.mark.parametrize("deed", ["promote", "rollback"])
def test_sigkill(deed: str, template: Path, tmp_path: Path) -> None:
    """A real end of real processes, right after each write that there is."""
    for nth in _writes(DEEDS[deed], template, tmp_path):
        with copied(template, tmp_path) as folder:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), deed, str(nth)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
            )  # fmt: skip
            assert done.returncode == -signal.SIGKILL
            check(CheckpointStore(str(folder)), DEEDS[deed])


def _writes(deed: Deed, template: Path, tmp_path: Path) -> list[int]:
    """Which of its requests change anything."""
    found: list[int] = []
    with copied(template, tmp_path) as folder:
        store = CheckpointStore(str(folder))
        seen: list[str] = []

        class Counting(Dying):
            def __getattr__(self, name: str) -> Any:
                attribute = super().__getattr__(name)
                if name in ("read", "sizes"):
                    seen.append(name)
                elif name in ("create", "write", "remove"):
                    seen.append(name)
                    found.append(len(seen))
                return attribute

        store.storage = Counting(store.storage, 10**6)  # type: ignore[assignment]
        deed.act(store)
    return found
