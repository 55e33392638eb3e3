"""Committing, listing, opening and deleting checkpoints."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import msgspec
import pytest

from tests.support.manifests import (
    commit_files,
    entry,
    keys_of,
    new_manifest,
    put_files,
    stored_keys,
    upload,
)
from tests.support.stores import FOLDER_FIRST
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest, tombstone
from trial_core.checkpoint.storage.base import StoredObject
from trial_core.checkpoint.store import CheckpointStore, StorageSpec
from trial_core.checkpoint.verified_read import Damage, find_damage
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    StorageError,
)


def commit_at_once(store: CheckpointStore, manifests: list[Manifest]) -> list[str]:
    """Commit each on its own thread; the attempts that succeeded."""
    barrier = Barrier(len(manifests))

    def commit(manifest: Manifest) -> str | None:
        barrier.wait(timeout=10)
        try:
            store.commit(manifest)
        except CommitConflict:
            return None
        return manifest.writer

    with ThreadPoolExecutor(len(manifests)) as pool:
        return [winner for winner in pool.map(commit, manifests) if winner is not None]


def rivals(count: int) -> list[Manifest]:
    """Manifests of one checkpoint by different attempts."""
    shared = str(uuid.uuid4())
    return [new_manifest(uuid=shared, writer=f"attempt-{n}") for n in range(count)]


def test_a_committed_checkpoint_is_found(store: CheckpointStore, tmp_path: Path) -> None:
    """It is listed and opened as it was committed."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    assert store.list() == [manifest]
    assert store.open(manifest.uuid) == manifest


def test_an_empty_store_lists_nothing(store: CheckpointStore) -> None:
    """A storage that nothing was ever written to is not an error."""
    assert store.list() == []
    assert store.newest("gpt-0123abcd") is None
    assert store.newest_trial("gpt") is None


def test_uncommitted_files_are_no_checkpoint(local_store: CheckpointStore, tmp_path: Path) -> None:
    """They are not listed, opened or resumed from."""
    manifest = upload(local_store, tmp_path / "staging")
    assert local_store.list() == local_store.resume_candidates(manifest.trial) == []
    assert local_store.newest(manifest.trial) is None
    with pytest.raises(CheckpointNotFound, match="the storage has no checkpoints"):
        local_store.open(manifest.uuid)


def test_the_second_writer_gets_a_conflict(store: CheckpointStore) -> None:
    """It does not overwrite the first writer's manifest."""
    first, second = rivals(2)
    store.commit(first)
    with pytest.raises(CommitConflict, match="by another writer than attempt-1"):
        store.commit(second)
    assert store.list() == [first]


def test_a_commit_may_be_repeated(store: CheckpointStore) -> None:
    """The same manifest is no conflict."""
    manifest = new_manifest()
    store.commit(manifest)
    store.commit(manifest)
    assert store.list() == [manifest]


class Answer(Exception):
    """What a server's answer looks like in botocore."""

    def __init__(self, code: str) -> None:
        self.response = {"Error": {"Code": code}}


def test_a_lost_reply_is_no_failure(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was carried out succeeds although its client saw an error."""
    create = store.storage._create

    def create_and_lose_the_reply(path: str, data: bytes) -> None:
        create(path, data)
        raise ConnectionResetError

    monkeypatch.setattr(store.storage, "_create", create_and_lose_the_reply)
    manifest = new_manifest()
    store.commit(manifest)
    assert store.list() == [manifest]


def test_a_conditional_conflict_is_retried(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS may refuse both of two concurrent conditional writes."""
    create, answers = local_store.storage._create, [Answer("ConditionalRequestConflict")]

    def create_later(path: str, data: bytes) -> None:
        if answers:
            raise OSError(errno.EIO, "conflict") from answers.pop()
        create(path, data)

    monkeypatch.setattr(local_store.storage, "_create", create_later)
    local_store.commit(new_manifest())
    assert len(local_store.list()) == 1


def test_a_failed_commit_is_no_conflict(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing was written, the storage has failed."""

    def fail(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_store.storage, "_create", fail)
    with pytest.raises(StorageError, match="no space is left"):
        local_store.commit(new_manifest())
    assert local_store.list() == []


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_one_of_many_concurrent_commits_succeeds(kind: str, tmp_path: Path) -> None:
    """Its manifest is the stored one. (Moto's S3 lets several succeed.)"""
    store = CheckpointStore(f"file://{tmp_path}" if kind == "file" else f"memory://{uuid.uuid4()}")
    for _ in range(5):
        manifests = rivals(16)
        assert commit_at_once(store, manifests) == [store.open(manifests[0].uuid).writer]


def test_in_memory_a_create_is_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec checks and then writes; if two writers check first, still only one succeeds."""
    store = CheckpointStore(f"memory://{uuid.uuid4()}")
    exists, both_looked = store.storage._fs.exists, Barrier(2)

    def look_together(path: str) -> bool:
        found: bool = exists(path)
        with contextlib.suppress(BrokenBarrierError):
            both_looked.wait(timeout=0.1)
        return found

    monkeypatch.setattr(store.storage._fs, "exists", look_together)
    assert len(commit_at_once(store, rivals(2))) == 1


def test_a_commit_leaves_no_temporary_file(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Whether it succeeds or not."""
    commit_at_once(local_store, rivals(4))
    assert [path.suffix for path in (tmp_path / "local").rglob("*") if path.is_file()] == [".json"]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [(entry("a", b"12", 5), "is missing"), (entry("b", b"12", 5), "has 3 bytes")],
)
def test_a_commit_requires_every_file(
    local_store: CheckpointStore, tmp_path: Path, listed: FileEntry, seen: str
) -> None:
    """The error names the file, its rank, and what is wrong."""
    manifest = upload(local_store, tmp_path / "staging", {"b": b"123"})
    manifest = msgspec.structs.replace(manifest, files=[listed])
    with pytest.raises(CheckpointDamaged, match=f"written by rank 5, {seen}"):
        local_store.commit(manifest)
    assert local_store.list() == []


def test_an_invalid_manifest_is_not_committed(local_store: CheckpointStore) -> None:
    """What readers would refuse is refused before."""
    with pytest.raises(CheckpointDamaged, match="not a plain relative path"):
        local_store.commit(new_manifest(files=[entry("../x")]))
    assert local_store.list() == []


# ------------------------------------------------------------------------- listing and opening


def test_a_list_is_ordered_by_time(local_store: CheckpointStore) -> None:
    """Oldest first; a trial's list holds only its own checkpoints."""
    for n, trial in [(13, "b-1"), (7, "a-1"), (11, "a-1")]:
        local_store.commit(new_manifest(n, trial=trial))
    assert [each.progress.batches_trained for each in local_store.list()] == [7, 11, 13]
    assert [each.progress.batches_trained for each in local_store.list("a-1")] == [7, 11]
    assert local_store.list("a") == []


@pytest.mark.parametrize(
    "look",
    [
        lambda store: store.list(new_manifest().trial),
        lambda store: store.resume_candidates(new_manifest().trial),
        lambda store: [store.newest(new_manifest().trial)],
    ],
    ids=["list", "resume_candidates", "newest"],
)
def test_a_listing_is_of_one_moment(
    local_store: CheckpointStore,
    look: Callable[[CheckpointStore], list[Manifest]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial that always has a checkpoint is never seen without one: not while a later checkpoint
    is committed and the listed one deleted."""
    run, read = CheckpointStore(local_store.url), local_store.storage.read
    old, new = commit_files(run, 7), new_manifest(11)

    def replace_and_read(key: str) -> bytes | None:
        monkeypatch.setattr(local_store.storage, "read", read)
        run.commit(new)
        run.delete(old)
        return read(key)

    monkeypatch.setattr(local_store.storage, "read", replace_and_read)
    assert look(local_store) == [new]


def test_resume_candidates_are_ordered_by_batches(local_store: CheckpointStore) -> None:
    """Most batches first; of two with as many, the later one."""
    for batches, second in [(11, 4), (11, 5), (7, 9)]:
        local_store.commit(new_manifest(batches, created_at=f"2031-05-09T17:00:0{second}.000000Z"))
    candidates = local_store.resume_candidates("gpt-0123abcd")
    order = [(each.progress.batches_trained, each.created_at[-9]) for each in candidates]
    assert order == [(11, "5"), (11, "4"), (7, "9")]
    assert local_store.newest("gpt-0123abcd") == candidates[0]
    assert [*local_store.newest_first("gpt-0123abcd")] == candidates


def test_candidates_one_by_one_know_what_is_deleted_meanwhile(local_store: CheckpointStore) -> None:
    """The storage is listed again then: a later checkpoint may have been committed before."""
    saved = [new_manifest(batches) for batches in (3, 5, 7)]
    for manifest in saved:
        local_store.commit(manifest)
    found = local_store.newest_first(saved[0].trial)
    assert next(found) == saved[2]
    local_store.delete(saved[1])
    local_store.commit(later := new_manifest(9))
    assert [*found] == [later, saved[0]]


def test_the_newest_trial_is_of_the_experiment(local_store: CheckpointStore) -> None:
    """It is the trial that saved last, of those that can be read."""
    local_store.storage.write(layout.manifest_key("a-0", 7, "half"), b"{")
    for second, trial, experiment in [(1, "a-1", "a"), (2, "a-2", "a"), (3, "b-1", "b")]:
        local_store.commit(new_manifest(second, trial=trial, experiment=experiment))
    assert local_store.newest_trial("a") == "a-2"
    assert local_store.newest_trial("c") is None


@pytest.mark.parametrize("data", [b"", b'{"uuid": "half', b"{}"])
def test_an_unreadable_manifest_is_not_listed(
    local_store: CheckpointStore, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is skipped with a warning, and opening it says what is wrong."""
    good, bad = new_manifest(7), new_manifest(11)
    local_store.commit(good)
    local_store.storage.write(bad.name.key, data)
    with caplog.at_level(logging.WARNING):
        assert local_store.list() == [good]
    assert bad.uuid in caplog.text
    assert local_store.newest(good.trial) == good
    with pytest.raises(CheckpointDamaged, match=bad.uuid):
        local_store.open(bad.uuid)


def test_a_trial_without_a_readable_manifest_is_damaged(local_store: CheckpointStore) -> None:
    """It is not mistaken for a trial without checkpoints."""
    manifest = new_manifest()
    local_store.storage.write(manifest.name.key, b"{")
    with pytest.raises(CheckpointDamaged, match=manifest.uuid):
        local_store.resume_candidates(manifest.trial)


def test_a_copied_manifest_is_not_listed(local_store: CheckpointStore) -> None:
    """A manifest counts only under its own key."""
    manifest = new_manifest()
    key = layout.manifest_key(manifest.trial, 99, manifest.uuid)
    local_store.storage.write(key, manifest.to_json())
    assert local_store.list() == []


def test_a_newer_schema_is_not_listed(local_store: CheckpointStore) -> None:
    """Opening it says why."""
    newer = new_manifest(schema_version=3)
    local_store.storage.write(newer.name.key, newer.to_json())
    assert local_store.list() == []
    with pytest.raises(CheckpointError, match="schema version 3"):
        local_store.open(newer.uuid)


def test_open_takes_a_unique_prefix(local_store: CheckpointStore) -> None:
    """An ambiguous or unknown prefix is refused, and the error lists checkpoints."""
    for name in ("aaaa-1", "aaab-2", "aaab"):
        local_store.commit(new_manifest(uuid=name))
    assert local_store.open("aaaa").uuid == "aaaa-1"
    assert local_store.open("aaab").uuid == "aaab"
    with pytest.raises(
        CheckpointNotFound, match=r"3 checkpoints .* begin with 'aaa'; .*: .*aaaa-1"
    ):
        local_store.open("aaa")
    with pytest.raises(CheckpointNotFound, match=r"there are 3: .*7 batches"):
        local_store.open("b")


def test_open_does_not_take_an_empty_name(local_store: CheckpointStore) -> None:
    """Also if there is only one checkpoint, with which all begins."""
    local_store.commit(new_manifest())
    with pytest.raises(CheckpointNotFound, match="begins with ''; there are 1"):
        local_store.open("")


def test_open_names_checkpoints_of_a_storage_without_times(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with most batches first."""
    objects = local_store.storage.objects
    for batches in (7, 30, 11):
        local_store.commit(new_manifest(batches, uuid=f"a{batches}"))

    def without_times(folder: str) -> dict[str, StoredObject]:
        return {key: each._replace(modified_at=None) for key, each in objects(folder).items()}

    monkeypatch.setattr(local_store.storage, "objects", without_times)
    with pytest.raises(CheckpointNotFound) as refused:
        local_store.open("b")
    assert re.findall(r"a(\d+) \(", str(refused.value)) == ["30", "11", "7"]


def test_open_says_that_a_checkpoint_has_just_been_deleted(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was listed."""
    manifest = commit_files(local_store)
    monkeypatch.setattr(local_store.storage, "read", lambda key: None)
    with pytest.raises(CheckpointNotFound, match=f"{manifest.uuid} has just been deleted"):
        local_store.open(manifest.uuid)


def test_a_checkpoint_that_is_being_swept_is_not_listed(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A later attempt has put a tombstone in the place of its manifest. That is no damage."""
    manifest = new_manifest()
    local_store.storage.write(manifest.name.key, tombstone(manifest.uuid))
    assert local_store.list() == []
    assert local_store.newest(manifest.trial) is None
    assert caplog.text == ""


@pytest.mark.parametrize(("wanted", "begins"), [("a", "7 checkpoints in "), ("b", "no ")])
def test_open_lists_this_experiments_newest_checkpoints(
    tmp_path: Path, wanted: str, begins: str
) -> None:
    """Newest first, whatever their batches; five, then the count of the others."""
    store = CheckpointStore(f"file://{tmp_path}", experiment="My GPT")
    saved = [("my-gpt-0b", 900), ("other-0a", 11), ("my-gpt-0a", 30), ("my-gpt-0a", 20)]
    saved += [("my-gpt-2-0a", 13), ("other-0a", 17), ("my-gpt-0c", 10)]
    for age, (trial, batches) in enumerate(reversed(saved)):
        manifest = new_manifest(batches, uuid=f"a{batches}", trial=trial)
        store.commit(manifest)
        os.utime(tmp_path / manifest.name.key, (age, age))
    with pytest.raises(CheckpointNotFound) as refused:
        store.open(wanted)
    assert str(refused.value).startswith(begins)
    assert re.findall(r"a(\d+) \(", str(refused.value)) == ["900", "30", "20", "10", "11"]
    assert "and 2 more (`trialflow checkpoints list`)" in str(refused.value)


def test_verify_reads_every_byte(store: CheckpointStore, tmp_path: Path) -> None:
    """A changed byte is found; the error names the file, its rank and both digests."""
    manifest = upload(store, tmp_path / "staging", {"a": b"1234", "b": b"5678"}, rank=3)
    store.commit(manifest)
    assert store.verify(manifest.uuid[:8]) == manifest
    store.storage.write(layout.file_key(manifest.uuid, "b"), b"5679")
    expected = r"b, written by rank 3, has digest sha256:\w+, expected sha256:\w+"
    with pytest.raises(CheckpointDamaged, match=expected):
        store.verify(manifest.uuid)


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_not_damaged(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may be used instead."""
    manifest = upload(local_store, tmp_path / "staging", {"a": b"1234"})
    local_store.commit(manifest)

    def find_while_deleted(*arguments: Any) -> list[Damage]:
        local_store.delete(manifest)
        return find_damage(*arguments)

    monkeypatch.setattr("trial_core.checkpoint.store.find_damage", find_while_deleted)
    with pytest.raises(CheckpointNotFound, match="has been deleted meanwhile"):
        local_store.verify(manifest.uuid)


def test_a_small_file_is_verified(local_store: CheckpointStore, tmp_path: Path) -> None:
    """Damage is noted. Of a deleted checkpoint it means nothing."""
    manifest = upload(local_store, tmp_path / "staging", {"a": b"1234"})
    local_store.commit(manifest)
    assert local_store.read_file(manifest, "a") == b"1234"
    assert local_store.read_file(manifest, "b") is None
    local_store.storage.write(layout.file_key(manifest.uuid, "a"), b"1235")
    with pytest.raises(CheckpointDamaged, match="a, written by rank 3, has digest"):
        local_store.read_file(manifest, "a")
    note = layout.damage_key(manifest.uuid, "a")
    assert local_store.storage.exists(note)
    local_store.storage.write(manifest.name.key, b"{")
    with pytest.raises(CheckpointDamaged, match="a, written by rank 3, has digest"):
        local_store.read_file(manifest, "a")
    local_store.delete(manifest)
    with pytest.raises(CheckpointNotFound, match="has been deleted meanwhile"):
        local_store.read_file(manifest, "a")
    assert not local_store.storage.exists(note)


# ------------------------------------------------------------------------------------ deleting


@pytest.mark.parametrize("kind", FOLDER_FIRST, indirect=True)
def test_a_deletion_takes_everything(store: CheckpointStore, tmp_path: Path) -> None:
    """Manifest, files and stray files go, other checkpoints stay; it may be repeated."""
    kept, gone = upload(store, tmp_path / "kept"), upload(store, tmp_path / "gone")
    for manifest in (kept, gone):
        store.commit(manifest)
    store.storage.write(layout.file_key(gone.uuid, "stray"), b"1")
    for _ in range(2):
        store.delete(gone)
        assert store.list() == [kept]
        assert stored_keys(store) == keys_of([kept])


def test_a_deletion_takes_the_manifest_first(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted deletion leaves no checkpoint that is listed without its files."""
    manifest = upload(local_store, tmp_path / "staging")
    local_store.commit(manifest)

    def fail(folder: str, keep: object) -> None:
        raise StorageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(local_store.storage, "clear", fail)
        with pytest.raises(StorageError, match="killed"):
            local_store.delete(manifest)
    assert local_store.list() == []
    local_store.delete(manifest)
    assert stored_keys(local_store) == set()


@pytest.mark.parametrize(
    ("stays", "named"), [("manifests/", "manifests/.*json"), ("checkpoints/", "1 of 3 objects")]
)
def test_a_deletion_checks_that_objects_are_gone(
    local_store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stays: str,
    named: str,
) -> None:
    """A storage that confirms a deletion and keeps the object raises, and names the object."""
    manifest = upload(local_store, tmp_path / "staging")
    local_store.commit(manifest)
    delete: Callable[[str], None] = local_store.storage.delete
    kept: list[str] = []

    def keep_one(key: str) -> None:
        if key.startswith(stays) and (not kept or kept == [key]):
            kept[:] = [key]
        else:
            delete(key)

    monkeypatch.setattr(local_store.storage, "delete", keep_one)
    with pytest.raises(StorageError, match=rf"{named}.* still there after .* legal hold"):
        local_store.delete(manifest)


# ----------------------------------------------------------------------------------- the store


def test_a_spec_opens_the_same_store(store: CheckpointStore) -> None:
    """Also after its way to the ranks as JSON."""
    manifest = new_manifest()
    store.commit(manifest)
    spec = msgspec.json.decode(msgspec.json.encode(store.spec), type=StorageSpec)
    assert CheckpointStore.from_spec(spec).list() == [manifest]
    assert store.is_process_local == store.url.startswith("memory://")


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path holds in ranks with another working directory."""
    monkeypatch.chdir(tmp_path)
    assert CheckpointStore("some/folder").spec.url == f"file://{tmp_path}/some/folder"


def test_a_check_leaves_no_probe(store: CheckpointStore) -> None:
    """The probe object is deleted."""
    store.storage.check_usable()
    assert store.storage.sizes("probes") == {}


def test_a_failed_listing_is_an_error(tmp_path: Path) -> None:
    """A storage that cannot be listed is not mistaken for an empty one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        CheckpointStore(str(tmp_path / "file")).list()


@pytest.mark.parametrize("kind", FOLDER_FIRST, indirect=True)
def test_a_forgotten_trial_leaves_nothing(store: CheckpointStore) -> None:
    """Checkpoints, uploads, attempts and run files; other trials have theirs."""
    other = commit_files(store, 7, trial="other-1")
    before = every_key(store)
    fence = store.take_over("gpt-1", "one")
    commit_files(store, 7, trial="gpt-1")
    begun = put_files(store, 11, trial="gpt-1")
    store.announce_upload("gpt-1", begun.uuid, "one", fence)
    for folder in layout.trial_folders("gpt-1"):
        store.storage.write(f"{folder}/object", b"x")
    store.forget_trial("gpt-1")
    assert every_key(store) == before
    assert store.verify(other.uuid) == other


def every_key(store: CheckpointStore) -> set[str]:
    """Of checkpoints and of trials."""
    tops = {each.partition("/")[0] for each in layout.trial_folders("x")}
    return {key for top in {layout.CHECKPOINTS, *tops} for key in store.storage.sizes(top)}
