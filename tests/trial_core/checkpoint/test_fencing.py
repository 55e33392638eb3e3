"""A presumed-dead run cannot commit after another run has taken over its trial."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import subprocess
import sys
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.interleaving import FailingStore, interleave
from tests.support.manifests import keys_of, new_manifest, put_files, stored_keys
from tests.support.stores import mount, unmount
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import ATTEMPTS_KEPT, AttemptRecord, Fence
from trial_core.checkpoint.manifest import Manifest, tombstone
from trial_core.checkpoint.storage_mark import marked, read_mark
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, StorageError, Superseded

TRIAL = new_manifest().trial
long = pytest.mark.long


def save(store: CheckpointStore, fence: Fence, batches: int = 7) -> Manifest:
    """Save a checkpoint as a run does."""
    manifest = put_files(store, batches)
    store.announce_upload(TRIAL, manifest.uuid, "attempt", fence)
    store.commit(manifest, fence)
    return manifest


def test_only_the_newest_attempt_may_save(store: CheckpointStore) -> None:
    """The attempt before it can no longer announce an upload, commit or sweep."""
    first = store.take_over(TRIAL, "one")
    saved = save(store, first)
    begun = put_files(store, 11)
    store.announce_upload(TRIAL, begun.uuid, "one", first)
    second = store.take_over(TRIAL, "two")
    for refused in (
        lambda: store.announce_upload(TRIAL, str(uuids.uuid4()), "one", first),
        lambda: store.commit(begun, first),
        lambda: store.sweep(TRIAL, first),
    ):
        with pytest.raises(Superseded, match=r"attempt two, by .*@.* at 2.*Z, has taken over"):
            refused()
    assert begun.uuid in {each.uuid for each in store.sweep(TRIAL, second)}
    later = save(store, second, 13)
    assert store.resume_candidates(TRIAL) == [later, saved]
    assert stored_keys(store) == keys_of([saved, later])


def test_attempts_at_other_trials_do_not_supersede(local_store: CheckpointStore) -> None:
    """A take-over applies to one trial, not to trials whose names begin alike."""
    fence = local_store.take_over(TRIAL, "one")
    for other in (f"{TRIAL}-1", TRIAL[:-1]):
        local_store.take_over(other, "two")
    save(local_store, fence)


def test_concurrent_take_overs_get_different_numbers(store: CheckpointStore) -> None:
    """The attempt with the highest number is the newest."""
    with ThreadPoolExecutor(4) as pool:
        fences = list(pool.map(lambda n: store.take_over(TRIAL, f"attempt-{n}"), range(6)))
    assert sorted(fence.number for fence in fences) == [1, 2, 3, 4, 5, 6]
    assert [fence.number for fence in fences if fence.is_newest()] == [6]


def test_deleted_attempts_stay_superseded(local_store: CheckpointStore) -> None:
    """Only the newest few attempts stay recorded; the others still cannot commit."""
    fences = [local_store.take_over(TRIAL, f"attempt-{n}") for n in range(ATTEMPTS_KEPT + 3)]
    assert len(local_store.storage.sizes(layout.attempts_folder(TRIAL))) == ATTEMPTS_KEPT
    with pytest.raises(Superseded, match=f"number {ATTEMPTS_KEPT + 3}; this is attempt attempt-0"):
        fences[0].check("nothing is done")
    fences[-1].check("nothing is done")


def test_a_half_written_attempt_supersedes(local_store: CheckpointStore) -> None:
    """An attempt that was killed during its take-over has its number."""
    fence = local_store.take_over(TRIAL, "one")
    local_store.storage.write(layout.attempt_key(TRIAL, 2), b'{"trial": "g')
    with pytest.raises(Superseded, match=r"another attempt has taken over trial .*, as number 2"):
        fence.check("nothing is done")
    assert local_store.take_over(TRIAL, "three").number == 3


def test_a_foreign_object_beside_attempts_is_ignored_with_a_warning(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The take-over warns once and names the object; later checks of the fence do not repeat it."""
    local_store.take_over(TRIAL, "one")
    key = f"{layout.attempts_folder(TRIAL)}/000007 (copy).json"
    local_store.storage.write(key, b"{}")
    second = local_store.take_over(TRIAL, "two")
    second.check("nothing is saved")
    assert second.number == 2
    assert caplog.text.count(f"{local_store.url}/{key} is ignored") == 1


def test_a_sweep_leaves_uploads_of_later_attempts(local_store: CheckpointStore) -> None:
    """Also if it was superseded after it had checked its fence."""
    first = local_store.take_over(TRIAL, "one")
    second = local_store.take_over(TRIAL, "two")
    begun = put_files(local_store, 7)
    local_store.announce_upload(TRIAL, begun.uuid, "two", second)
    first.check = lambda consequence: None  # type: ignore[method-assign]  # it has checked before
    assert local_store.sweep(TRIAL, first) == []
    local_store.commit(begun, second)
    assert local_store.list() == [begun]


def test_a_tombstone_is_no_checkpoint(store: CheckpointStore) -> None:
    """It is not listed, opened or resumed from, and prevents the commit."""
    manifest = put_files(store, 7)
    store.storage.create(manifest.name.key, tombstone(manifest.uuid))
    assert (store.list(), store.resume_candidates(TRIAL), store.newest(TRIAL)) == ([], [], None)
    with pytest.raises(CheckpointNotFound):
        store.open(manifest.uuid)
    with pytest.raises(Superseded, match="not committed, and its uploaded files are deleted"):
        store.commit(manifest, store.take_over(TRIAL, "one"))


# ----------------------------------------------------------------------------- another storage


def without_attempts(root: Path) -> None:
    """Replace the storage by one with its mark, in which no attempt has taken the trial."""
    shutil.copy(unmount(root) / layout.MARK, root)


def with_another_mark(root: Path) -> None:
    """Replace the storage by another, in which a trial of this id has as many attempts."""
    unmount(root)
    CheckpointStore(str(root)).take_over(TRIAL, "theirs")


@pytest.mark.parametrize("replace", [unmount, without_attempts, with_another_mark])
def test_an_attempt_stores_nothing_in_another_storage(
    local_store: CheckpointStore, tmp_path: Path, replace: Callable[[Path], object]
) -> None:
    """The error names the storage and says what to do. Mounted again, the attempt may commit."""
    fence = local_store.take_over(TRIAL, "one")
    begun = put_files(local_store, 11)
    local_store.announce_upload(TRIAL, begun.uuid, "one", fence)
    replace(tmp_path / "local")
    for refused in (
        lambda: local_store.announce_upload(TRIAL, str(uuids.uuid4()), "one", fence),
        lambda: local_store.commit(begun, fence),
        lambda: local_store.sweep(TRIAL, fence),
    ):
        with pytest.raises(StorageError, match=f"{local_store.url} is not the storage .* Mount it"):
            refused()
    assert local_store.list() == []
    mount(tmp_path / "local")
    local_store.commit(begun, fence)
    assert local_store.list() == [begun]


@pytest.mark.parametrize("new_mark", [False, True])
def test_an_attempt_survives_the_loss_of_the_mark(
    local_store: CheckpointStore, new_mark: bool
) -> None:
    """Its own record tells the storage. It writes the mark again, unless another run has."""
    fence = local_store.take_over(TRIAL, "one")
    local_store.storage.delete(layout.MARK)
    if new_mark:
        marked(local_store.storage)
    save(local_store, fence)
    assert (read_mark(local_store.storage) == fence.record.storage) is not new_mark
    again = local_store.take_over(TRIAL, "one", mark=fence.record.storage)
    assert again.record.storage == read_mark(local_store.storage)
    with pytest.raises(Superseded, match="as number 2"):
        fence.check("nothing is done")


def test_a_record_with_another_mark_is_of_another_storage(local_store: CheckpointStore) -> None:
    """A trial's id may be in both. A record that cannot be read says nothing."""
    local_store.take_over(TRIAL, "one")
    local_store.storage.write(layout.attempt_key(TRIAL, 2), b"{")
    with pytest.raises(StorageError, match="no record of the run is there"):
        local_store.take_over(TRIAL, "one", mark="another storage's")


def test_a_start_may_know_a_mark_that_is_lost(local_store: CheckpointStore) -> None:
    """A record of the trial names it. Another trial's record does not."""
    mark = local_store.take_over(TRIAL, "one").record.storage
    local_store.storage.delete(layout.MARK)
    with pytest.raises(StorageError, match="no record of the run is there"):
        local_store.take_over("another", "one", mark=mark)
    assert local_store.take_over(TRIAL, "one", mark=mark).number == 2
    assert read_mark(local_store.storage) == mark


class UnmountedStore(FailingStore):
    """Another client of a store, whose folder is unmounted before the `nth` request."""

    def _count(self, request: Callable[[], Any]) -> Any:
        self.requests += 1
        if self.requests == self._nth:
            unmount(Path(self.url.removeprefix("file://")))
        return request()


def test_a_storage_may_be_unmounted_at_any_request_of_a_commit(tmp_path: Path) -> None:
    """The empty folder has no checkpoint afterwards; the storage has it, or the next commit."""
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        store = CheckpointStore(str(root))
        fence = store.take_over(TRIAL, "one")
        begun = put_files(store, 11)
        store.announce_upload(TRIAL, begun.uuid, "one", fence)
        unmounted = UnmountedStore(store, nth)
        with contextlib.suppress(StorageError):
            unmounted.commit(begun, Fence(unmounted.storage, fence.record))
        if not unmounted.has_failed:
            break
        assert store.list() == []
        mount(root)
        store.commit(begun, fence)
        assert store.list() == [begun]
    assert nth == 8


# In a namespace whose mounts nobody else sees.
UNMOUNT = """
import subprocess, sys
from pathlib import Path
from tests.support.manifests import put_files
from trial_core.errors import StorageError
from trial_core.checkpoint.store import CheckpointStore

root, disk = map(Path, sys.argv[1:])
for folder in (root, disk):
    folder.mkdir()
mount = ["mount", "--bind", str(disk), str(root)]
subprocess.run(mount, check=True)
store = CheckpointStore(str(root))
begun = put_files(store, 11)
fence = store.take_over(begun.trial, "one")
subprocess.run(["umount", str(root)], check=True)
try:
    store.commit(begun, fence)
except StorageError as error:
    print(error)
assert not list(root.glob("manifests/**/*.json"))
subprocess.run(mount, check=True)
store.commit(begun, fence)
assert [each.uuid for each in store.list()] == [begun.uuid]
"""


@long
def test_a_file_system_may_be_unmounted(tmp_path: Path) -> None:
    """A real one: the commit fails, and succeeds when it is mounted again."""
    namespace = ["unshare", "-rm"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not create a mount namespace")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", UNMOUNT, str(tmp_path / "mnt"), str(tmp_path / "disk")],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "has no trialflow-storage.json, expected " in done.stdout


# ------------------------------------------------------------------ two attempts at the same time


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each actor sends one request at a time."""
    monkeypatch.setattr("trial_core.checkpoint.storage.parallel.READ_THREADS", 1)


class Scene(NamedTuple):
    """A trial whose attempt has saved one checkpoint and uploaded the files of another."""

    store: CheckpointStore
    record: AttemptRecord
    saved: Manifest
    begun: Manifest


def new_scene(is_begun: bool = True) -> Scene:
    """A scene in memory.

    Args:
        is_begun: whether the upload of the second checkpoint is announced.
    """
    store = CheckpointStore(f"memory://{uuids.uuid4()}")
    fence = store.take_over(TRIAL, "one")
    saved = save(store, fence)
    begun = put_files(store, 11)
    if is_begun:
        store.announce_upload(TRIAL, begun.uuid, "one", fence)
    return Scene(store, fence.record, saved, begun)


def restart(store: CheckpointStore, attempt: str) -> tuple[list[Manifest], list[Manifest]]:
    """Take over, sweep, and list the checkpoints to resume from: all, and the complete ones."""
    fence = store.take_over(TRIAL, attempt)
    store.sweep(TRIAL, fence)
    seen = store.resume_candidates(TRIAL)
    return seen, [each for each in seen if has_all_files(store, each)]


def has_all_files(store: CheckpointStore, manifest: Manifest) -> bool:
    return len(store.storage.sizes(layout.files_folder(manifest.uuid))) == len(manifest.files)


def uuids_of(manifests: Iterable[Manifest]) -> list[str]:
    return [manifest.uuid for manifest in manifests]


def meet(order: Iterable[bool], is_begun: bool) -> tuple[str, str]:
    """Let one attempt commit, while another takes over, in this order of requests.

    Returns:
        The commit's outcome, and how many of the checkpoints that the other saw were complete.
    """
    scene = new_scene(is_begun)

    def wake_up(store: CheckpointStore) -> Manifest:
        fence = Fence(store.storage, scene.record)
        if not is_begun:
            store.announce_upload(TRIAL, scene.begun.uuid, "one", fence)
        store.commit(scene.begun, fence)
        return scene.begun

    committed, taken_over = interleave(
        scene.store.url, wake_up, lambda store: restart(store, "two"), order
    )
    assert isinstance(committed, (Manifest, Superseded)), committed
    assert not isinstance(taken_over, Exception), taken_over
    seen, complete = taken_over
    listed = scene.store.list()
    assert all(has_all_files(scene.store, each) for each in listed)
    # The checkpoint that the other resumes from stays, and it has seen all that are listed.
    assert set(uuids_of(complete[:1])) <= set(uuids_of(listed)) <= set(uuids_of(seen))
    assert scene.saved in listed
    assert len(listed) == 1 + isinstance(committed, Manifest)
    restart(scene.store, "three")
    assert scene.store.list() == listed
    assert stored_keys(scene.store) == keys_of(listed)
    MemoryFileSystem.store.clear()  # each listing reads all of it
    return type(committed).__name__, f"{len(complete)} of {len(seen)}"


COMMIT_REQUESTS, RESTART_REQUESTS = 10, 20
"""Upper bounds of the requests of a commit and of a take-over."""


def alternating_orders(step: int) -> Iterator[list[bool]]:
    """Pause the commit before each of its requests, while the take-over sends some of its own."""
    commit, restart = COMMIT_REQUESTS, RESTART_REQUESTS
    for first, second in itertools.product(range(commit), range(0, restart, step)):
        for more in (1, commit) if (first + second) % 3 == 0 else (commit,):
            yield [False] * first + [True] * second + [False] * more + [True] * restart


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("is_begun", "step"),
    [(True, 5), pytest.param(True, 1, marks=long), pytest.param(False, 3, marks=long)],
)
def test_a_commit_during_a_take_over(is_begun: bool, step: int) -> None:
    """In any order of requests the commit holds and the other run sees it, or nothing is left."""
    seen = {meet(order, is_begun)[0] for order in alternating_orders(step)}
    assert seen == {"Manifest", "Superseded"}


@long
@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("seed", range(4))
def test_a_commit_during_a_take_over_in_random_order(seed: int) -> None:
    """As above, with orders drawn at random."""
    rng = random.Random(seed)
    for _ in range(25):
        runs = [[rng.random() < 0.6] * rng.choice([1, 1, 2, 4]) for _ in range(40)]
        meet(itertools.chain(*runs), rng.random() < 0.5)


@pytest.mark.usefixtures("one_by_one")
def test_some_order_deletes_a_manifest_that_was_seen() -> None:
    """The tests above reach the case that a run sees a checkpoint without files and skips it."""
    orders = (
        [False] * 4 + [True] * second + [False] + [True] * RESTART_REQUESTS
        for second in range(RESTART_REQUESTS)
    )
    assert any(meet(order, is_begun=True) == ("Superseded", "1 of 2") for order in orders)


@pytest.mark.parametrize("is_done", [False, pytest.param(True, marks=long)])
def test_a_take_over_may_crash_at_any_request(is_done: bool) -> None:
    """The superseded attempt and the next take-over then agree on what is committed."""
    for nth in itertools.count(1):
        scene = new_scene()
        fence = Fence(scene.store.storage, scene.record)
        announce_commit(scene, fence)
        try:
            restart(FailingStore(scene.store, nth, is_done), "two")
        except StorageError:
            pass
        else:
            break
        try:
            scene.store.commit(scene.begun, fence)
            expected = [scene.saved, scene.begun]
        except Superseded:
            expected = [scene.saved]
        _, complete = restart(scene.store, "three")
        assert uuids_of(complete)[::-1] == uuids_of(expected)
        assert stored_keys(scene.store) == keys_of(expected)
    assert nth > 10


def announce_commit(scene: Scene, fence: Fence) -> None:
    """Begin a commit that stops before it checks the fence."""

    class Paused(Exception):
        pass

    def pause(consequence: str) -> None:
        raise Paused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fence, "check", pause)
        with pytest.raises(Paused):
            scene.store.commit(scene.begun, fence)


def test_a_commit_takes_seven_requests(local_store: CheckpointStore) -> None:
    """The number does not grow with checkpoints and attempts."""
    seen = set()
    for number in (0, 1, ATTEMPTS_KEPT + 1):
        fence = local_store.take_over(TRIAL, f"attempt-{number}")
        manifest = put_files(local_store, number)
        local_store.announce_upload(TRIAL, manifest.uuid, fence.attempt, fence)
        counting = FailingStore(local_store, nth=1000)
        counting.commit(manifest, Fence(counting.storage, fence.record))
        seen.add(counting.requests)
    assert seen == {7}


def test_a_commit_may_be_repeated(local_store: CheckpointStore, tmp_path: Path) -> None:
    """After a lost reply the second commit finds that the first has succeeded."""
    fence = local_store.take_over(TRIAL, "one")
    manifest = save(local_store, fence)
    local_store.commit(manifest, fence)
    assert local_store.list() == [manifest]
    assert stored_keys(local_store) == keys_of([manifest])


def test_an_old_record_that_stays_stops_no_take_over(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the cause; the next take-over deletes it."""

    def refuse(key: str) -> None:
        raise StorageError("access was refused")

    with monkeypatch.context() as patch:
        patch.setattr(local_store.storage, "remove", refuse)
        fences = [local_store.take_over(TRIAL, str(i)) for i in range(ATTEMPTS_KEPT + 1)]
    assert fences[-1].is_newest()
    assert "stays recorded until the next take-over: access was refused" in caplog.text
    local_store.take_over(TRIAL, "last")
    assert len(local_store.storage.sizes(layout.attempts_folder(TRIAL))) == ATTEMPTS_KEPT
