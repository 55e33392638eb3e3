"""Fencing: an attempt that was taken for dead wakes up, and saves; another has taken over since."""

from __future__ import annotations

import itertools
import random
import uuid as uuids
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.interleaving import interleave
from tests.support.manifests import FILES, Breaking, entry, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import ATTEMPTS_KEPT, AttemptRecord, Fence
from trial_core.checkpoint.manifest import Manifest, tombstone
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, StorageError, Superseded

TRIAL = new_manifest().trial


def put_files(store: CheckpointStore, batches: int) -> Manifest:
    """Store a checkpoint's files; the manifest that would commit it."""
    files = [entry(path, data) for path, data in FILES.items()]
    manifest = new_manifest(batches, files=files)
    for path, data in FILES.items():
        store.storage.write(layout.file_key(manifest.uuid, path), data)
    return manifest


def save(store: CheckpointStore, fence: Fence, batches: int = 7) -> Manifest:
    """Save as a run does."""
    manifest = put_files(store, batches)
    store.announce_upload(TRIAL, manifest.uuid, "attempt", fence)
    store.commit(manifest, fence)
    return manifest


def everything(store: CheckpointStore) -> set[str]:
    """All keys in the store but those that say who has taken over."""
    folders = (layout.MANIFESTS, layout.CHECKPOINTS, layout.UPLOADS)
    return {key for folder in folders for key in store.storage.sizes(folder)}


def keys_of(manifests: Iterable[Manifest]) -> set[str]:
    """What committed checkpoints consist of."""
    return {
        key
        for each in manifests
        for key in (each.name.key, *(layout.file_key(each.uuid, file.path) for file in each.files))
    }


def test_the_last_attempt_may_save(store: CheckpointStore) -> None:
    """On every kind of storage; and the one before it may not begin, commit or sweep any more."""
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
        with pytest.raises(Superseded, match=r"attempt two, by .*@.* at 2.*Z, has taken over trial"):
            refused()
    assert begun.uuid in {each.uuid for each in store.sweep(TRIAL, second)}
    later = save(store, second, 13)
    assert store.resume_candidates(TRIAL) == [later, saved]
    assert everything(store) == keys_of([saved, later])


def test_attempts_at_other_trials_do_not_matter(local_store: CheckpointStore) -> None:
    """A trial is taken over by its whole name."""
    fence = local_store.take_over(TRIAL, "one")
    for other in (f"{TRIAL}-1", TRIAL[:-1]):
        local_store.take_over(other, "two")
    save(local_store, fence)


def test_of_many_who_take_over_at_once_one_is_the_last(store: CheckpointStore) -> None:
    """Each has a number of its own, and the highest may save."""
    with ThreadPoolExecutor(4) as pool:
        fences = list(pool.map(lambda n: store.take_over(TRIAL, f"attempt-{n}"), range(6)))
    assert sorted(fence.number for fence in fences) == [1, 2, 3, 4, 5, 6]
    assert [fence.number for fence in fences if fence.is_newest()] == [6]


def test_old_attempts_are_forgotten_and_stay_superseded(store: CheckpointStore) -> None:
    """A few are kept; who is no longer written down is told the same."""
    fences = [store.take_over(TRIAL, f"attempt-{n}") for n in range(ATTEMPTS_KEPT + 3)]
    assert len(store.storage.sizes(layout.attempts_folder(TRIAL))) == ATTEMPTS_KEPT
    with pytest.raises(Superseded, match=f"number {ATTEMPTS_KEPT + 3}; this is attempt attempt-0"):
        fences[0].check("nothing is done")
    fences[-1].check("nothing is done")


def test_half_a_token_counts(local_store: CheckpointStore) -> None:
    """Whoever was killed while writing it had taken over, and the next one comes after it."""
    fence = local_store.take_over(TRIAL, "one")
    local_store.storage.write(layout.attempt_key(TRIAL, 2), b'{"trial": "g')
    with pytest.raises(Superseded, match=f"another attempt has taken over trial {TRIAL}, as number 2"):
        fence.check("nothing is done")
    assert local_store.take_over(TRIAL, "three").number == 3


def test_an_upload_of_a_later_attempt_is_not_swept(local_store: CheckpointStore) -> None:
    """One that was superseded while it swept leaves its successor's upload alone."""
    first = local_store.take_over(TRIAL, "one")
    second = local_store.take_over(TRIAL, "two")
    begun = put_files(local_store, 7)
    local_store.announce_upload(TRIAL, begun.uuid, "two", second)
    first.check = lambda what: None  # type: ignore[method-assign]  # it had looked before
    assert local_store.sweep(TRIAL, first) == []
    local_store.commit(begun, second)
    assert local_store.list() == [begun]


def test_what_was_given_up_is_no_checkpoint(store: CheckpointStore) -> None:
    """What stands in for its manifest while it is deleted is not listed, opened or trained from."""
    manifest = put_files(store, 7)
    store.storage.create(manifest.name.key, tombstone(manifest.uuid))
    assert (store.list(), store.resume_candidates(TRIAL), store.newest(TRIAL)) == ([], [], None)
    with pytest.raises(CheckpointNotFound):
        store.open(manifest.uuid)
    with pytest.raises(Superseded, match="not committed, and its uploaded files are deleted"):
        store.commit(manifest, store.take_over(TRIAL, "one"))


# ------------------------------------------------------------------ two attempts at the same time


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each actor sends one request at a time."""
    monkeypatch.setattr("trial_core.checkpoint.store._READ_THREADS", 1)


class Scene(NamedTuple):
    """A trial with one checkpoint, of an attempt that has the files of another one."""

    store: CheckpointStore
    token: AttemptRecord
    saved: Manifest
    begun: Manifest


def new_scene(is_begun: bool = True) -> Scene:
    """A scene in memory.

    Args:
        is_begun: whether it is said that the second checkpoint is being uploaded.
    """
    store = CheckpointStore(f"memory://{uuids.uuid4()}")
    fence = store.take_over(TRIAL, "one")
    saved = save(store, fence)
    begun = put_files(store, 11)
    if is_begun:
        store.announce_upload(TRIAL, begun.uuid, "one", fence)
    return Scene(store, fence.record, saved, begun)


def restart(store: CheckpointStore, attempt: str) -> tuple[list[Manifest], list[Manifest]]:
    """Take over and look what to go on from: all that is listed, and what of it is whole."""
    fence = store.take_over(TRIAL, attempt)
    store.sweep(TRIAL, fence)
    seen = store.resume_candidates(TRIAL)
    return seen, [each for each in seen if is_whole(store, each)]


def is_whole(store: CheckpointStore, manifest: Manifest) -> bool:
    """Whether all of its files are there."""
    there = store.storage.sizes(layout.files_folder(manifest.uuid))
    return len(there) == len(manifest.files)


def meet(order: Iterable[bool], is_begun: bool) -> tuple[str, str]:
    """One attempt commits what it has begun, or begins it first, while another takes over, in that
    order of requests.

    Returns:
        How each of them ended, in a word.
    """
    scene = new_scene(is_begun)

    def wake_up(store: CheckpointStore) -> Manifest:
        fence = Fence(store.storage, scene.token)
        if not is_begun:
            store.announce_upload(TRIAL, scene.begun.uuid, "one", fence)
        store.commit(scene.begun, fence)
        return scene.begun

    committed, taken_over = interleave(
        scene.store.url, wake_up, lambda store: restart(store, "two"), order
    )
    assert isinstance(committed, (Manifest, Superseded)), committed
    assert not isinstance(taken_over, Exception), taken_over
    seen, whole = taken_over
    listed = scene.store.list()
    assert all(is_whole(scene.store, each) for each in listed)
    # What the other goes on from stays; and nothing is there that it has not seen.
    assert set(uuids_of(whole[:1])) <= set(uuids_of(listed)) <= set(uuids_of(seen))
    assert scene.saved in listed
    assert len(listed) == 1 + isinstance(committed, Manifest)
    restart(scene.store, "three")
    assert scene.store.list() == listed
    assert everything(scene.store) == keys_of(listed)
    MemoryFileSystem.store.clear()  # each listing looks through all of it
    return type(committed).__name__, f"{len(whole)} of {len(seen)}"


def uuids_of(manifests: Iterable[Manifest]) -> list[str]:
    return [manifest.uuid for manifest in manifests]


FIRST, SECOND = 9, 18
"""More requests than the one has, and the other."""


def turns_about(step: int) -> Iterator[list[bool]]:
    """Orders in which the first is paused before each of its requests, while the second does some
    or all of its own; then the first does one more, or all."""
    for first, second in itertools.product(range(FIRST), range(0, SECOND, step)):
        for more in (1, FIRST) if (first + second) % 3 == 0 else (FIRST,):
            yield [False] * first + [True] * second + [False] * more + [True] * SECOND


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(("is_begun", "step"), [(True, 1), (False, 3)])
def test_a_commit_and_a_take_over_at_the_same_moment(is_begun: bool, step: int) -> None:
    """In whatever order their requests come: the commit holds, and whoever takes over sees it; or
    it is refused, and nothing is left of it. Nobody goes on from what is then taken back."""
    seen = {meet(order, is_begun)[0] for order in turns_about(step)}
    assert seen == {"Manifest", "Superseded"}


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("seed", range(4))
def test_a_commit_and_a_take_over_in_any_order(seed: int) -> None:
    """As above, with orders drawn at random, now one and then the other for a few requests."""
    rng = random.Random(seed)
    for _ in range(25):
        runs = [[rng.random() < 0.6] * rng.choice([1, 1, 2, 4]) for _ in range(40)]
        meet(itertools.chain(*runs), rng.random() < 0.5)


@pytest.mark.usefixtures("one_by_one")
def test_the_orders_reach_a_manifest_that_is_taken_back() -> None:
    """The tests above can tell: there are orders in which whoever takes over sees a checkpoint
    that has lost its files, and does not go on from it."""
    manifest_next = [False] * 3
    ends = {
        meet([*manifest_next, *[True] * second, False, *[True] * SECOND], is_begun=True)
        for second in range(SECOND)
    }
    assert ("Superseded", "1 of 2") in ends


@pytest.mark.parametrize("is_done", [False, True])
def test_who_takes_over_may_die(is_done: bool) -> None:
    """At each of its requests, carried out or not: the one that was superseded, and the next that
    takes over, find the same."""
    for nth in itertools.count(1):
        scene = new_scene()
        fence = Fence(scene.store.storage, scene.token)
        announce_only(scene, fence)
        broken = CheckpointStore(scene.store.url)
        storage: Any = Breaking(broken.storage, nth, is_done)
        broken.storage = storage
        try:
            restart(broken, "two")
        except StorageError:
            pass
        else:
            break
        try:
            scene.store.commit(scene.begun, fence)
            expected = [scene.saved, scene.begun]
        except Superseded:
            expected = [scene.saved]
        _, whole = restart(scene.store, "three")
        assert uuids_of(whole)[::-1] == uuids_of(expected)
        assert everything(scene.store) == keys_of(expected)
    assert nth > 10


def announce_only(scene: Scene, fence: Fence) -> None:
    """The commit has begun, and was held up before it has looked for anything."""

    class Paused(Exception):
        pass

    def pause(what: str) -> None:
        raise Paused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fence, "check", pause)
        with pytest.raises(Paused):
            scene.store.commit(scene.begun, fence)


def test_a_commit_takes_a_few_requests(local_store: CheckpointStore) -> None:
    """As many for the first checkpoint of the first attempt as for a later one of a later one."""
    seen = set()
    for number in range(ATTEMPTS_KEPT + 2):
        fence = local_store.take_over(TRIAL, f"attempt-{number}")
        manifest = put_files(local_store, number)
        local_store.announce_upload(TRIAL, manifest.uuid, fence.attempt, fence)
        counting = CheckpointStore(local_store.url)
        counter: Any = Breaking(counting.storage, 1000, False)
        counting.storage = counter
        counting.commit(manifest, Fence(counter, fence.record))
        seen.add(1000 - counter.left)
    assert seen == {6}


def test_a_commit_may_be_repeated(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Its reply was lost: the second time finds that it was done."""
    fence = local_store.take_over(TRIAL, "one")
    manifest = save(local_store, fence)
    local_store.commit(manifest, fence)
    assert local_store.list() == [manifest]
    assert everything(local_store) == keys_of([manifest])
