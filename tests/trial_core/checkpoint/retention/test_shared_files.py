"""A file that has not changed is stored twice, and stays while any checkpoint lists it."""

from __future__ import annotations

import contextlib
import logging
import uuid as uuids
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.interleaving import FailingStore, all_orders, clear_memory, interleave_all
from tests.support.manifests import new_manifest, stage, stored_files, stored_keys
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.retention.leftovers import find_orphaned_files, sweep_orphaned_files
from trial_core.checkpoint.retention.protections import pins
from trial_core.checkpoint.retention.pruning import delete_checkpoint, plan_pruning, prune
from trial_core.checkpoint.retention.shared_files import announce_shared_upload, repair
from trial_core.checkpoint.retention_policy import RetentionDecision, RetentionPolicy
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import copy_into
from trial_core.checkpoint.transfer.fetch import download, fetch_files
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    StorageError,
    Superseded,
)

TRIAL = new_manifest().trial
FROZEN = {"base/frozen weights.pt": b"frozen" * 1009, "base/tokenizer.json": b"{}" * 89}
KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
LATEST = RetentionPolicy(save_trial_best=0, save_trial_latest=1)
logger = logging.getLogger(__name__)


def save(
    store: CheckpointStore,
    staging: Path,
    batches: int = 7,
    fence: Any = None,
    frozen: dict[str, bytes] = FROZEN,
    code: bytes | None = None,
    adapter: bytes | None = None,
) -> Manifest:
    """Save a checkpoint of frozen files and of one that changes, as the stage of a run does."""
    manifest = new_manifest(batches)
    base, shared = announce_shared_upload(store, TRIAL, manifest.uuid, "attempt", fence, logger)
    staged = stage(staging / manifest.uuid, {**frozen, "adapter.pt": adapter or b"%d" % batches})
    files = upload_files(store, manifest.uuid, staged, 0, shared=shared)
    entry = upload_code(store, manifest.uuid, code, shared)
    manifest = new_manifest(batches, uuid=manifest.uuid, files=files, code=entry)
    store.commit(manifest, fence, base)
    return manifest


def references(manifest: Manifest) -> set[str]:
    """Which of a checkpoint's files have a copy that an earlier one has stored."""
    return {file.path for file in manifest.all_files if file.stored_at or file.copy_at}


def whole(store: CheckpointStore) -> list[int]:
    """The batches of the checkpoints that are intact, in the order to resume from them."""
    return [
        each.progress.batches_trained
        for each in store.resume_candidates(TRIAL)
        if not store.find_damage(each.uuid, each.all_files)
    ]


def flip_a_bit(store: CheckpointStore, key: str) -> None:
    data = bytearray(store.storage.read(key) or b"")
    data[len(data) // 2] ^= 1
    store.storage.write(key, bytes(data))


def stored(store: CheckpointStore) -> set[str]:
    """The keys of all checkpoints' files."""
    return set(store.storage.sizes(layout.CHECKPOINTS))


def listed(store: CheckpointStore) -> set[str]:
    """The keys of all files that a committed checkpoint lists, second copies too."""
    return {copy.key(each.uuid) for each in store.list() for copy in each.copies}


def pass_time(monkeypatch: pytest.MonkeyPatch, passed: timedelta) -> None:
    """Let time pass by the storage's clock."""
    at = datetime.now(timezone.utc) + passed
    monkeypatch.setattr(Storage, "now", lambda self: at)


def assert_sound(store: CheckpointStore) -> None:
    """Each checkpoint is whole, there are no other files, and no deletion is unfinished."""
    for each in store.list():
        assert store.find_damage(each.uuid, each.copies) == []
    assert stored(store) == listed(store)
    assert store.storage.sizes(layout.DELETIONS) == {}


# ---------------------------------------------------------------------------------- references


def test_what_has_not_changed_is_not_stored_again(store: CheckpointStore, tmp_path: Path) -> None:
    """The first two checkpoints store files and code; later ones use the copies in turn."""
    first = save(store, tmp_path, 7, code=b"code")
    second = save(store, tmp_path, 11, code=b"code")
    third = save(store, tmp_path, 13, code=b"other code")
    fourth, fifth = save(store, tmp_path, 17), save(store, tmp_path, 19)
    assert references(first) == set()
    assert references(second) == {*FROZEN, layout.CODE_NAME}
    assert references(third) == set(FROZEN)
    for each, owner in ((second, second), (third, first), (fourth, second), (fifth, first)):
        assert {file.place(each.uuid)[0] for file in each.files} == {owner.uuid, each.uuid}
    assert second.own_bytes == second.total_bytes
    assert third.own_bytes == len(b"13") + len(b"other code")
    assert fifth.own_bytes == len(b"19")
    assert stored(store) == listed(store)
    assert store.verify(third.uuid) == third
    assert download(store, third.uuid, tmp_path / "third") == third
    fetched = stored_files(tmp_path / "third")
    assert {path: fetched[path] for path in FROZEN} == FROZEN
    download(store, second.uuid, tmp_path / "second")
    assert (tmp_path / "second" / layout.CODE_NAME).read_bytes() == b"code"


def test_equal_content_under_another_name_is_shared(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Size and digest decide; a checkpoint has at least one file of its own."""
    save(local_store, tmp_path, 7)
    renamed = {"moved.pt": FROZEN["base/frozen weights.pt"]}
    second = save(local_store, tmp_path, 11, frozen=renamed)
    assert references(second) == {"moved.pt"}
    same = save(local_store, tmp_path, 11, frozen=renamed)
    assert references(same) == {"moved.pt"}  # not the smallest, which is equal as well
    again = save(local_store, tmp_path, 11, frozen=renamed)
    assert {file.path for file in again.files if file.stored_at} == {"moved.pt"}


def test_an_earlier_schema_is_read_and_referred_to(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """As a checkpoint of this version is."""
    entries = upload_files(local_store, "old", stage(tmp_path / "old", FROZEN), 0)
    old = new_manifest(7, uuid="old", files=entries, schema_version=1)
    local_store.commit(old)
    assert local_store.verify("old") == old
    second = save(local_store, tmp_path, 11)
    assert references(second) == set(FROZEN)
    local_store.delete(old)
    assert_sound(local_store)


@pytest.mark.parametrize("field", ["stored_at", "copy_at"])
@pytest.mark.parametrize("place", ["../x", "uuid", "uuid/../../x", "/etc/passwd", "a b/c"])
def test_a_place_outside_the_checkpoints_is_refused(place: str, field: str) -> None:
    """A hostile manifest cannot have other objects read, or deleted with it."""
    entry = FileEntry(path="a", size_bytes=1, digest="sha256:" + "0" * 64, rank=0)
    entry = msgspec.structs.replace(entry, **{field: place})
    with pytest.raises(CheckpointDamaged, match="is stored at"):
        Manifest.from_json(new_manifest(files=[entry]).to_json())


def test_another_trials_checkpoint_loses_nothing(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A hostile manifest that refers to its files is deleted without them."""
    other = save(local_store, tmp_path, 7)
    entry = FileEntry(
        path="a", size_bytes=len(FROZEN["base/tokenizer.json"]), digest=other.files[2].digest,
        rank=0, stored_at=f"{other.uuid}/base/tokenizer.json",
    )  # fmt: skip
    hostile = new_manifest(trial="evil-1", files=[entry])
    local_store.commit(hostile)
    local_store.delete(hostile)
    assert_sound(local_store)


def test_a_copy_in_another_storage_is_complete(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """It has files of its own, whatever the original referred to."""
    save(local_store, tmp_path, 7)
    second = save(local_store, tmp_path, 11, code=b"code")
    other = CheckpointStore(str(tmp_path / "other"))
    copy = copy_into(other, local_store.files_url(second.uuid), other.take_over(TRIAL, "one"))
    assert references(copy) == set()
    assert other.verify(second.uuid) == copy


# ------------------------------------------------------------------------------------ deletion


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *(("file", order) for order in ORDERS),
        ("s3", (1, 0, 2)),
        *(pytest.param("s3", order, marks=pytest.mark.long) for order in ORDERS[:2]),
        *(pytest.param("memory", order, marks=pytest.mark.long) for order in ORDERS),
    ],
    indirect=["kind"],
)
def test_a_file_stays_while_a_checkpoint_lists_it(
    store: CheckpointStore, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """And goes with the last one, whichever that is."""
    saved = [save(store, tmp_path, batches) for batches in (7, 11, 13)]
    for index in order:
        delete_checkpoint(store, saved[index])
        assert_sound(store)
    assert stored_keys(store) == set()


def test_a_plan_tells_what_is_freed(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Files that a kept checkpoint lists are not freed; and so says the prune."""
    for batches in (7, 11, 131):
        save(local_store, tmp_path, batches)
    plan = plan_pruning(local_store, LATEST, "gpt")
    pruned = prune(local_store, plan)
    assert len(pruned.deleted) == 2
    assert plan.freed_bytes == pruned.freed_bytes == len(b"7") + len(b"11")
    (last,) = local_store.list()  # it alone lists both copies now
    plan = replace(plan, decisions=(RetentionDecision(last, keep=False, why=""),))
    assert plan.freed_bytes == sum(local_store.storage.sizes(layout.CHECKPOINTS).values())


def test_leftovers_of_a_deleted_checkpoint_are_no_orphans(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a manifest of their own stay while one refers to them."""
    age = timedelta(days=7)
    first, second = save(local_store, tmp_path, 7), save(local_store, tmp_path, 11)
    local_store.delete(first)
    pass_time(monkeypatch, timedelta(days=30))
    assert find_orphaned_files(local_store, age) == []
    assert sweep_orphaned_files(local_store, first.uuid, age) is None
    local_store.storage.write(layout.file_key(first.uuid, "junk"), b"junk")
    assert [each.uuid for each in find_orphaned_files(local_store, age)] == [first.uuid]
    swept = sweep_orphaned_files(local_store, first.uuid, age)
    assert swept is not None
    assert swept.files == 1
    assert local_store.verify(second.uuid) == second
    local_store.storage.remove(second.name.key)
    left = {each.uuid for each in find_orphaned_files(local_store, age)}
    assert left == {first.uuid, second.uuid}


@pytest.mark.parametrize(
    "data", [b"{", new_manifest(uuid="u", schema_version=3).to_json()], ids=["damaged", "newer"]
)
def test_an_unreadable_manifest_may_need_any_file(
    local_store: CheckpointStore, tmp_path: Path, data: bytes
) -> None:
    """Checkpoints of its trial are spared until it is restored or deleted, and it is named."""
    first = save(local_store, tmp_path, 7)
    second = save(local_store, tmp_path, 11)
    written = local_store.storage.read(second.name.key)
    assert written is not None
    local_store.storage.write(second.name.key, data)
    pruned = prune(local_store, plan_pruning(local_store, KEEP_NONE, "gpt"))
    assert [each.manifest for each in pruned.spared] == [first]
    assert f"{second.name.key} cannot be read" in pruned.spared[0].why
    with pytest.raises(CheckpointError, match="cannot be read"):
        delete_checkpoint(local_store, first)
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        local_store.delete(first)
    local_store.storage.write(second.name.key, written)
    assert local_store.verify(second.uuid) == second


def test_the_base_of_an_upload_is_not_deleted(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Neither by a prune nor by a script: the upload may refer to its files."""
    first = save(local_store, tmp_path, 7)
    announce_shared_upload(local_store, TRIAL, "new", "attempt", None, logger)
    pruned = prune(local_store, plan_pruning(local_store, KEEP_NONE, "gpt"))
    assert pruned.deleted == ()
    with pytest.raises(CheckpointError, match="checkpoint new, whose upload has begun, may refer"):
        delete_checkpoint(local_store, first)
    assert_sound(local_store)


# ------------------------------------------------------------------- saves and deletions at once


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """A store whose actors read one manifest at a time."""
    monkeypatch.setattr("trial_core.checkpoint.storage.parallel.READ_THREADS", 1)
    monkeypatch.setattr("trial_core.checkpoint.transfer.upload.UPLOAD_THREADS", 1)
    store = CheckpointStore(f"memory://{uuids.uuid4()}")
    yield store
    clear_memory()


def changes(verb: str, key: str) -> bool:
    """Whether the order matters most: writes of the protocol."""
    family = key.partition("/")[0]
    return (
        verb in ("write", "create", "remove")
        and family in (layout.DELETIONS, layout.UPLOADS, layout.MANIFESTS)
        and key != family
    ) or (verb == "clear" and family == layout.CHECKPOINTS)


def is_of_protocol(verb: str, key: str) -> bool:
    """As `changes`, and the looks."""
    family = key.partition("/")[0]
    looks = {layout.intents_folder(TRIAL), layout.trial_folder(TRIAL)}
    return changes(verb, key) or (
        verb in ("sizes", "objects")
        and (key in looks or (family == layout.DELETIONS and key != family))
    )


def is_of_repair(verb: str, key: str) -> bool:
    """Writes of a repair and a deletion, and their looks for one another."""
    family = key.partition("/")[0]
    return changes(verb, key) or (
        verb in ("write", "sizes", "remove")
        and family in (layout.PINS, layout.DELETIONS)
        and key != family
    )


Counts = Callable[[str, str], bool]


@pytest.mark.parametrize(
    ("counts", "requests"),
    [(changes, (4, 4)), pytest.param(is_of_protocol, (7, 7), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("is_owner_deleted", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_save_during_a_prune(
    scene: CheckpointStore,
    tmp_path: Path,
    counts: Counts,
    requests: tuple[int, ...],
    is_owner_deleted: bool,
) -> None:
    """In any order of requests, all that is listed is whole, and nothing else is left."""
    seen = set()
    for order in all_orders(*requests):
        first = save(scene, tmp_path, 7)
        if is_owner_deleted:
            save(scene, tmp_path, 8)
            scene.delete(first)
        plan = plan_pruning(scene, KEEP_NONE, "gpt")
        saved, pruned = interleave_all(
            scene.url,
            [partial(save, staging=tmp_path, batches=11), partial(prune, plan=plan)],
            order,
            counts,
        )
        assert isinstance(saved, Manifest), saved
        assert not isinstance(pruned, Exception), pruned
        assert_sound(scene)
        seen.add((bool(references(saved)), len(pruned.deleted)))
        clear_memory()
    assert {(True, 0), (True, 1), (False, 1)} <= seen


@pytest.mark.parametrize(
    ("counts", "requests"),
    [(changes, (3, 3)), pytest.param(is_of_protocol, (6, 6), marks=pytest.mark.long)],
)
def test_two_deletions_at_once(
    scene: CheckpointStore, tmp_path: Path, counts: Counts, requests: tuple[int, ...]
) -> None:
    """The last two checkpoints that list a file go, and the file with them."""
    for order in all_orders(*requests):
        first, second = save(scene, tmp_path, 7), save(scene, tmp_path, 11)
        outcomes = interleave_all(
            scene.url,
            [partial(delete_checkpoint, manifest=each) for each in (first, second)],
            order,
            counts,
        )
        assert outcomes == [None, None]
        assert stored_keys(scene) == set()
        clear_memory()


@pytest.mark.parametrize("is_done", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_prune_that_is_killed_anywhere(
    tmp_path: Path, scene: CheckpointStore, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """Whatever request is its last, checkpoints are whole, and the next prune tidies up."""
    for nth in range(1, 99):
        saved = [save(scene, tmp_path, batches) for batches in (7, 11, 13)]
        failing = FailingStore(scene, nth, is_done)
        plan = plan_pruning(scene, LATEST, "gpt")
        with contextlib.suppress(StorageError):
            prune(failing, plan)
        for each in scene.list():
            assert scene.find_damage(each.uuid, each.all_files) == []
        assert saved[-1] in scene.list()
        later = save(scene, tmp_path, 17)
        with monkeypatch.context() as patch:
            pass_time(patch, timedelta(hours=2))
            prune(scene, plan_pruning(scene, LATEST, "gpt"))
        assert scene.list() == [later]
        assert references(later) == set(FROZEN)
        assert_sound(scene)
        clear_memory()
        if not failing.has_failed:
            return
    raise AssertionError("the prune never succeeded")


@pytest.mark.parametrize("is_done", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_save_that_is_killed_anywhere(
    tmp_path: Path, scene: CheckpointStore, is_done: bool
) -> None:
    """Whatever request is its last: the next run sweeps, saves and prunes, and all is whole."""
    for nth in range(1, 99):
        save(scene, tmp_path, 7)
        failing = FailingStore(scene, nth, is_done)
        with contextlib.suppress(StorageError, CommitConflict):
            save(failing, tmp_path, 11, failing.take_over(TRIAL, "first"))
        fence = scene.take_over(TRIAL, "second")
        scene.sweep(TRIAL, fence)
        assert_sound(scene)
        save(scene, tmp_path, 13, fence)
        prune(scene, plan_pruning(scene, LATEST, "gpt"))
        assert len(scene.list()) == 1
        assert_sound(scene)
        clear_memory()
        if not failing.has_failed:
            return
    raise AssertionError("the save never succeeded")


def test_a_superseded_save_is_found_swept(scene: CheckpointStore, tmp_path: Path) -> None:
    """Though nothing has changed, and what it refers to is there: it has a file of its own.

    In any order of requests.
    """
    same, has_swept = b"unchanged", False
    for order in all_orders(4, 5):
        save(scene, tmp_path, 7, adapter=same)
        old = scene.take_over(TRIAL, "old")

        def supersede(store: CheckpointStore) -> tuple[Manifest, set[str | None]]:
            fence = store.take_over(TRIAL, "new")
            swept = {each.uuid for each in store.sweep(TRIAL, fence)}
            return save(store, tmp_path, 13, fence, adapter=same), swept

        late, saved = interleave_all(
            scene.url,
            [partial(save, staging=tmp_path, batches=11, fence=old, adapter=same), supersede],
            order,
            lambda verb, key: changes(verb, key) or (verb, key[:8]) == ("create", "attempts"),
        )
        assert isinstance(late, (Manifest, Superseded, CommitConflict)), late
        assert isinstance(saved, tuple), saved
        has_swept = has_swept or bool(saved[1])
        assert saved[1].isdisjoint(each.uuid for each in scene.list())
        for each in scene.list():
            assert scene.find_damage(each.uuid, each.all_files) == []
        clear_memory()
    assert has_swept


def test_a_base_that_is_being_deleted_is_not_referred_to(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """All files are stored anew."""
    first = save(local_store, tmp_path, 7)
    mark_deletion(local_store, first)
    assert references(save(local_store, tmp_path, 11)) == set()


# -------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("finder", ["verify", "fetch"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_damage_is_named_and_stored_anew(
    local_store: CheckpointStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    finder: str,
    is_missing: bool,
) -> None:
    """Once a reader has found other bytes, or a file is gone, the next save has its own."""
    first, _, second = [save(local_store, tmp_path, batches) for batches in (7, 11, 12)]
    path = "base/frozen weights.pt"
    key, data = layout.file_key(first.uuid, path), FROZEN[path]
    if is_missing:
        local_store.storage.remove(key)
    else:
        local_store.storage.write(key, b"X" + data[1:])
    seen = rf"{path}, stored by checkpoint {first.uuid}, (is missing|has digest)"
    find = {
        "verify": lambda: local_store.verify(second.uuid),
        "fetch": lambda: fetch_files(local_store, second.uuid, second.files, tmp_path / "fetched"),
    }[finder]
    with pytest.raises(CheckpointDamaged, match=seen):
        find()
    third = save(local_store, tmp_path, 13)
    assert path in caplog.text
    assert "its content is stored again" in caplog.text
    assert {file.path for file in third.files if file.stored_at} == {"base/tokenizer.json"}
    assert listed(local_store) - {key} == stored(local_store) - {key}
    assert key not in {copy.key(third.uuid) for file in third.files for copy in file.copies}
    assert local_store.verify(third.uuid) == third
    assert references(save(local_store, tmp_path, 17)) == set(FROZEN)
    prune(local_store, plan_pruning(local_store, LATEST, "gpt"))
    assert_sound(local_store)
    assert local_store.storage.sizes(layout.DAMAGES) == {}


@pytest.mark.parametrize("owner", [0, 1])
def test_a_damaged_shared_file_leaves_the_previous_checkpoint_whole(
    local_store: CheckpointStore, tmp_path: Path, owner: int
) -> None:
    """Two checkpoints in a row use different copies of a file that has not changed."""
    saved = [save(local_store, tmp_path, batches) for batches in (7, 11, 13, 17, 19)]
    flip_a_bit(local_store, layout.file_key(saved[owner].uuid, "base/frozen weights.pt"))
    assert whole(local_store) == [[17, 11], [19, 13, 7]][owner]


def test_the_newest_checkpoint_alone_keeps_both_copies(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A prune of the others takes neither, so the next checkpoints use them in turn."""
    for batches in (7, 11, 13):
        save(local_store, tmp_path, batches)
    prune(local_store, plan_pruning(local_store, LATEST, "gpt"))
    assert_sound(local_store)
    frozen = [key for key in stored(local_store) if key.endswith("frozen weights.pt")]
    assert len(frozen) == 2
    assert save(local_store, tmp_path, 17).own_bytes == len(b"17")


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_shared_file_is_repaired(
    local_store: CheckpointStore, tmp_path: Path, is_missing: bool
) -> None:
    """From an intact copy; what has no other copy stays damaged, and is returned."""
    saved = [save(local_store, tmp_path, batches) for batches in (7, 11, 13)]
    key = layout.file_key(saved[0].uuid, "base/frozen weights.pt")
    flip_a_bit(local_store, layout.file_key(saved[2].uuid, "adapter.pt"))
    flip_a_bit(local_store, key)
    if is_missing:
        local_store.storage.remove(key)
    damage = local_store.find_damage(saved[2].uuid, saved[2].all_files)
    left = repair(local_store, saved[2], damage)
    assert [each.entry.path for each in left] == ["adapter.pt"]
    assert whole(local_store) == [11, 7]
    assert local_store.storage.read(key) == FROZEN["base/frozen weights.pt"]
    assert [*local_store.storage.sizes(layout.DAMAGES)] == [
        layout.damage_key(saved[2].uuid, "adapter.pt")
    ]
    assert pins(local_store) == {}


def test_a_damaged_copy_repairs_nothing(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Each copy is read before it is stored in another place."""
    saved = [save(local_store, tmp_path, batches) for batches in (7, 11)]
    for each in saved:
        flip_a_bit(local_store, layout.file_key(each.uuid, "base/frozen weights.pt"))
    before = local_store.storage.read(key := saved[0].files[1].key(saved[0].uuid))
    damage = local_store.find_damage(saved[0].uuid, saved[0].all_files)
    assert repair(local_store, saved[0], damage) == damage != []
    assert local_store.storage.read(key) == before


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_is_no_copy(local_store: CheckpointStore, tmp_path: Path, is_folder: bool) -> None:
    """It may lead to any file of this user's, which nothing stores or tells the digest of."""
    saved = [save(local_store, tmp_path, batches) for batches in (7, 11)]
    root = Path(local_store.url.removeprefix("file://"))
    copy = root / layout.file_key(saved[1].uuid, "base/frozen weights.pt")
    assert copy.exists()
    linked = copy.parent if is_folder else copy
    linked.rename(tmp_path / "home")
    linked.symlink_to(tmp_path / "home")
    flip_a_bit(local_store, layout.file_key(saved[0].uuid, "base/frozen weights.pt"))
    damage = local_store.find_damage(saved[0].uuid, saved[0].all_files)
    assert repair(local_store, saved[0], damage) == damage != []
    (note,) = (root / layout.DAMAGES).rglob("*.json")
    assert damage[0].seen_digest is not None
    assert damage[0].seen_digest not in note.read_text()


def test_a_repair_that_stores_damage_is_none(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again; the note of the damage stays."""
    saved = [save(local_store, tmp_path, batches) for batches in (7, 11)]
    key = layout.file_key(saved[0].uuid, "base/frozen weights.pt")
    flip_a_bit(local_store, key)
    damage = local_store.find_damage(saved[0].uuid, saved[0].all_files)
    upload = local_store.storage.upload

    def upload_badly(*arguments: Any) -> Any:
        done = upload(*arguments)
        flip_a_bit(local_store, key)
        return done

    monkeypatch.setattr(local_store.storage, "upload", upload_badly)
    assert repair(local_store, saved[0], damage) == damage != []
    assert len(local_store.storage.sizes(layout.DAMAGES)) == 1


@pytest.mark.parametrize("content", [b"evil", FROZEN["base/tokenizer.json"]])
def test_a_repair_overwrites_no_file_of_another_trial(
    local_store: CheckpointStore, tmp_path: Path, content: bytes
) -> None:
    """A hostile manifest may name it, and have the bytes that would be written there."""
    victim = save(local_store, tmp_path, 7)
    place = f"{victim.uuid}/base/tokenizer.json"
    flip_a_bit(local_store, key := f"{layout.CHECKPOINTS}/{place}")
    damaged = local_store.storage.read(key)
    own = upload_files(local_store, "evil", stage(tmp_path / "evil", {"own": content}), 0)
    entry = FileEntry(
        path="a", size_bytes=own[0].size_bytes, digest=own[0].digest, rank=0, stored_at=place
    )
    hostile = new_manifest(trial="evil-1", uuid="evil", files=[*own, entry])
    local_store.storage.write(hostile.name.key, hostile.to_json())
    damage = local_store.find_damage("evil", hostile.all_files)
    assert repair(local_store, hostile, damage) == damage != []
    assert local_store.storage.read(key) == damaged


def test_a_repair_during_a_prune(scene: CheckpointStore, tmp_path: Path) -> None:
    """In any order of requests: the checkpoint is whole, refused, or deleted with all its files.

    A prune that looks for pins after the repair has ended deletes what was repaired.
    """
    seen = set()
    for order in all_orders(3, 4):
        saved = [save(scene, tmp_path, batches) for batches in (7, 11, 13)]
        flip_a_bit(scene, layout.file_key(saved[0].uuid, "base/frozen weights.pt"))
        damage = scene.find_damage(saved[2].uuid, saved[2].all_files)
        plan = plan_pruning(scene, KEEP_NONE, "gpt")
        plan = replace(plan, decisions=plan.decisions[-1:])
        repaired, pruned = interleave_all(
            scene.url,
            [partial(repair, manifest=saved[2], damage=damage), partial(prune, plan=plan)],
            order,
            is_of_repair,
        )
        assert not isinstance(pruned, Exception), pruned
        assert repaired == [] or isinstance(repaired, (CheckpointNotFound, CommitConflict))
        assert pins(scene) == {}
        assert stored(scene) == listed(scene)
        if repaired == []:
            assert_sound(scene)
        seen.add((repaired == [], saved[2] in scene.list()))
        clear_memory()
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_a_shared_file_that_vanishes_during_an_upload_fails_it(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """The commit names it; a retry of the upload stores it anew."""
    first, _ = save(local_store, tmp_path, 7), save(local_store, tmp_path, 8)
    base, shared = announce_shared_upload(local_store, TRIAL, "new", "attempt", None, logger)
    staged = stage(tmp_path / "staged", {**FROZEN, "own": b"1"})
    files = upload_files(local_store, "new", staged, 0, shared=shared)
    local_store.storage.remove(layout.file_key(first.uuid, "base/tokenizer.json"))
    with pytest.raises(StorageError, match=f"tokenizer.json, stored by checkpoint {first.uuid}"):
        local_store.commit(new_manifest(11, uuid="new", files=files), None, base)
    base, shared = announce_shared_upload(local_store, TRIAL, "new", "attempt", None, logger)
    files = upload_files(local_store, "new", staged, 0, shared=shared)
    saved = new_manifest(11, uuid="new", files=files)
    local_store.commit(saved, None, base)
    assert local_store.verify("new") == saved


def test_a_sweep_takes_nothing_that_a_checkpoint_refers_to(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """Also if the intent of the checkpoint that has stored it was left behind, and it is deleted
    since: the sweep takes it for an upload that was never committed."""
    first = save(local_store, tmp_path, 7, code=b"code")
    intent = layout.intent_key(TRIAL, first.uuid)
    second = save(local_store, tmp_path, 11, code=b"code")
    local_store.announce_upload(TRIAL, first.uuid, "attempt")
    local_store.delete(first)
    assert local_store.storage.exists(intent)
    local_store.sweep(TRIAL)
    assert not local_store.storage.exists(intent)
    assert local_store.verify(second.uuid) == second
    assert_sound(local_store)


def test_an_upload_is_repeated_after_a_commit_that_was_not_answered(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """It is not its own base: it gives the same manifest again, with what it referred to."""
    save(local_store, tmp_path, 7, code=b"code")
    for uuid, code in (("new", b"code"), ("newer", b"other code"), ("newest", b"other code")):
        made = []
        staged = stage(tmp_path / uuid, {**FROZEN, "adapter.pt": b"11"})
        for _ in range(2):
            base, shared = announce_shared_upload(local_store, TRIAL, uuid, "attempt", None, logger)
            files = upload_files(local_store, uuid, staged, 0, shared=shared)
            entry = upload_code(local_store, uuid, code, shared)
            made.append(new_manifest(11, uuid=uuid, files=files, code=entry))
            local_store.commit(made[-1], None, base)
        assert made[0] == made[1]
        assert local_store.verify(uuid) == made[0]
    assert_sound(local_store)


def test_a_reader_without_the_right_to_write_still_names_damage(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note for later saves is lost, with a warning."""
    first = save(local_store, tmp_path, 7)
    key = layout.file_key(first.uuid, "base/tokenizer.json")
    local_store.storage.write(key, b"[]" * 89)

    def refuse(key: str, data: bytes) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(local_store.storage, "write", refuse)
    with pytest.raises(CheckpointDamaged, match=r"tokenizer\.json"):
        local_store.verify(first.uuid)
