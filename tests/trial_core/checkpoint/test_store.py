from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import msgspec
import pytest

from tests.support.manifests import entry, new_manifest, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.store import CheckpointStore, StorageSpec
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    StorageError,
)


def commit_at_once(store: CheckpointStore, manifests: list[Manifest]) -> list[str]:
    """Commit each on a thread of its own; the attempts that won."""
    barrier = Barrier(len(manifests))

    def commit(manifest: Manifest) -> str | None:
        barrier.wait(timeout=10)
        try:
            store.commit(manifest)
        except CommitConflict:
            return None
        return manifest.attempt

    with ThreadPoolExecutor(len(manifests)) as pool:
        return [winner for winner in pool.map(commit, manifests) if winner is not None]


def rivals(count: int) -> list[Manifest]:
    """Manifests of one checkpoint by different writers."""
    shared = str(uuid.uuid4())
    return [new_manifest(uuid=shared, attempt=f"attempt-{n}") for n in range(count)]


def test_a_committed_checkpoint_is_found(store: CheckpointStore, tmp_path: Path) -> None:
    """What was committed is listed and opened as it was."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    assert store.list() == [manifest]
    assert store.open(manifest.uuid) == manifest


def test_an_empty_store_lists_nothing(store: CheckpointStore) -> None:
    """A storage that nothing was ever written to is no error."""
    assert store.list() == []
    assert store.newest("gpt-0123abcd") is None
    assert store.newest_trial("gpt") is None


def test_uncommitted_files_are_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    """Without its manifest nothing is listed, opened or gone on from."""
    manifest = upload(store, tmp_path / "staging")
    assert store.list() == store.resume_candidates(manifest.trial) == []
    assert store.newest(manifest.trial) is None
    with pytest.raises(CheckpointNotFound, match="the storage has no checkpoints"):
        store.open(manifest.uuid)


def test_another_writer_is_told_so(store: CheckpointStore) -> None:
    """The second writer of a checkpoint does not overwrite the first."""
    first, second = rivals(2)
    store.commit(first)
    with pytest.raises(CommitConflict, match="by another writer than attempt-1"):
        store.commit(second)
    assert store.list() == [first]


def test_ones_own_retry_has_won(store: CheckpointStore) -> None:
    """Committing the same manifest again is no conflict: the reply may have been lost."""
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
    """A commit that was done, though the client saw an error, has succeeded."""
    create = store.storage._create

    def create_and_lose_the_reply(path: str, data: bytes) -> None:
        create(path, data)
        raise ConnectionResetError

    monkeypatch.setattr(store.storage, "_create", create_and_lose_the_reply)
    manifest = new_manifest()
    store.commit(manifest)
    assert store.list() == [manifest]


def test_a_server_that_says_try_again_is_tried_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS may refuse both of two conditional writes at once; that is no conflict yet."""
    create, answers = store.storage._create, [Answer("ConditionalRequestConflict")]

    def create_later(path: str, data: bytes) -> None:
        if answers:
            raise OSError(errno.EIO, "conflict") from answers.pop()
        create(path, data)

    monkeypatch.setattr(store.storage, "_create", create_later)
    store.commit(new_manifest())
    assert len(store.list()) == 1


def test_a_failed_commit_is_no_conflict(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing was written the storage failed, and nobody else has won."""

    def fail(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.storage, "_create", fail)
    with pytest.raises(StorageError, match="no space is left there: make room"):
        store.commit(new_manifest())
    assert store.list() == []


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_of_writers_at_once_one_wins(kind: str, tmp_path: Path) -> None:
    """Sixteen commits race, one wins, and it is what is stored. (Moto itself loses this race.)"""
    store = CheckpointStore(f"file://{tmp_path}" if kind == "file" else f"memory://{uuid.uuid4()}")
    for _ in range(5):
        manifests = rivals(16)
        winners = commit_at_once(store, manifests)
        assert winners == [store.open(manifests[0].uuid).attempt]


def test_in_memory_no_two_writers_find_the_name_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec looks, then writes; let both look before either writes, and still one wins."""
    store = CheckpointStore(f"memory://{uuid.uuid4()}")
    exists, both_looked = store.storage._fs.exists, Barrier(2)

    def look_together(path: str) -> bool:
        found: bool = exists(path)
        with contextlib.suppress(BrokenBarrierError):
            both_looked.wait(timeout=0.1)
        return found

    monkeypatch.setattr(store.storage._fs, "exists", look_together)
    assert len(commit_at_once(store, rivals(2))) == 1


def test_commit_is_exclusive_without_hard_links(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without hard links still lets one writer win."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    manifests = rivals(16)
    winners = commit_at_once(local_store, manifests)
    assert winners == [local_store.open(manifests[0].uuid).attempt]


def test_commit_leaves_only_the_manifest(local_store: CheckpointStore, tmp_path: Path) -> None:
    """No temporary file stays behind, whether a commit wins or loses."""
    commit_at_once(local_store, rivals(4))
    assert [path.suffix for path in (tmp_path / "local").rglob("*") if path.is_file()] == [".json"]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [(entry("a", b"12", 5), "is missing"), (entry("b", b"12", 5), "has 3 bytes")],
)
def test_commit_wants_every_file(
    store: CheckpointStore, tmp_path: Path, listed: FileEntry, seen: str
) -> None:
    """A file that was not stored whole keeps its checkpoint from becoming real."""
    manifest = upload(store, tmp_path / "staging", {"b": b"123"})
    manifest = msgspec.structs.replace(manifest, files=[listed])
    with pytest.raises(CheckpointDamaged, match=f"written by rank 5, {seen}"):
        store.commit(manifest)
    assert store.list() == []


def test_commit_refuses_a_path_that_leads_out(store: CheckpointStore) -> None:
    """What readers would refuse is not committed in the first place."""
    with pytest.raises(CheckpointDamaged, match="not a plain relative path"):
        store.commit(new_manifest(files=[entry("../x")]))
    assert store.list() == []


def test_list_is_oldest_first_and_by_trial(store: CheckpointStore) -> None:
    """Time orders the list, and a trial's list has only its own."""
    manifests = [
        new_manifest(n, trial=trial) for n, trial in [(13, "b-1"), (7, "a-1"), (11, "a-1")]
    ]
    for manifest in manifests:
        store.commit(manifest)
    assert [each.progress.batches_trained for each in store.list()] == [7, 11, 13]
    assert [each.progress.batches_trained for each in store.list("a-1")] == [7, 11]
    assert store.list("a") == []


def test_candidates_go_by_batches_then_time(store: CheckpointStore) -> None:
    """A trial goes on from where it came furthest; of two such points, from the later one."""
    for batches, second in [(11, 4), (11, 5), (7, 9)]:
        store.commit(new_manifest(batches, created_at=f"2031-05-09T17:00:0{second}.000000Z"))
    candidates = store.resume_candidates("gpt-0123abcd")
    order = [(each.progress.batches_trained, each.created_at[-9]) for each in candidates]
    assert order == [(11, "5"), (11, "4"), (7, "9")]
    assert store.newest("gpt-0123abcd") == candidates[0]


def test_newest_trial_is_the_experiments_own(store: CheckpointStore) -> None:
    """The trial that saved last, among those of the experiment."""
    for second, trial, experiment in [(1, "a-1", "a"), (2, "a-2", "a"), (3, "b-1", "b")]:
        store.commit(new_manifest(second, trial=trial, experiment=experiment))
    assert store.newest_trial("a") == "a-2"
    assert store.newest_trial("c") is None


@pytest.mark.parametrize("data", [b"", b'{"uuid": "half', b"{}"])
def test_a_manifest_that_cannot_be_read_is_not_listed(
    store: CheckpointStore, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is skipped with a warning, the next older one is used, and opening it says what it is."""
    good, bad = new_manifest(7), new_manifest(11)
    store.commit(good)
    store.storage.write(bad.name.key, data)
    with caplog.at_level(logging.WARNING):
        assert store.list() == [good]
    assert bad.uuid in caplog.text
    assert store.newest(good.trial) == good
    with pytest.raises(CheckpointDamaged, match=bad.uuid):
        store.open(bad.uuid)


def test_a_copied_manifest_is_not_another_checkpoint(store: CheckpointStore) -> None:
    """A manifest counts only under its own name."""
    manifest = new_manifest()
    store.storage.write(layout.manifest_key(manifest.trial, 99, manifest.uuid), manifest.to_json())
    assert store.list() == []


def test_a_newer_schema_is_not_listed(store: CheckpointStore) -> None:
    """What a newer trialflow wrote is left alone, and opening it says why."""
    newer = new_manifest(schema_version=2)
    store.storage.write(newer.name.key, newer.to_json())
    assert store.list() == []
    with pytest.raises(CheckpointError, match="schema version 2"):
        store.open(newer.uuid)


def test_open_takes_a_unique_prefix(store: CheckpointStore) -> None:
    """A few characters are enough where they tell one checkpoint from the others."""
    for name in ("aaaa-1", "aaab-2", "aaab"):
        store.commit(new_manifest(uuid=name))
    assert store.open("aaaa").uuid == "aaaa-1"
    assert store.open("aaab").uuid == "aaab"
    with pytest.raises(CheckpointNotFound, match=r"3 checkpoints .* begin with 'aaa': .*aaaa-1"):
        store.open("aaa")
    with pytest.raises(CheckpointNotFound, match=r"there are 3: .*7 batches"):
        store.open("b")


def test_verify_reads_every_byte_again(store: CheckpointStore, tmp_path: Path) -> None:
    """A whole checkpoint gives its manifest; one in which a byte differs is damaged: which file,
    whose, and both digests are said."""
    manifest = upload(store, tmp_path / "staging", {"a": b"1234", "b": b"5678"}, rank=3)
    store.commit(manifest)
    assert store.verify(manifest.uuid[:8]) == manifest
    store.storage.write(layout.file_key(manifest.uuid, "b"), b"5679")
    expected = r"b, written by rank 3, has digest sha256:\w+, expected sha256:\w+"
    with pytest.raises(CheckpointDamaged, match=expected):
        store.verify(manifest.uuid)


def test_a_spec_opens_the_same_store(store: CheckpointStore) -> None:
    """What travels to the ranks as JSON leads to the same checkpoints."""
    manifest = new_manifest()
    store.commit(manifest)
    spec = msgspec.json.decode(msgspec.json.encode(store.spec), type=StorageSpec)
    assert CheckpointStore.from_spec(spec).list() == [manifest]


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's idea of a path holds in ranks that run elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert CheckpointStore("some/folder").spec.url == f"file://{tmp_path}/some/folder"


def test_only_memory_is_local_to_the_process(store: CheckpointStore) -> None:
    """A run on several processes must refuse what only one of them sees."""
    assert store.is_process_local == store.url.startswith("memory://")


def test_trying_a_storage_leaves_nothing(store: CheckpointStore) -> None:
    """The probe object is gone when the check is over."""
    store.check_writable()
    assert store.storage.sizes(layout.PROBES) == {}


def test_an_unreadable_listing_is_an_error(tmp_path: Path) -> None:
    """Storage that cannot be listed is not taken for one without checkpoints."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        CheckpointStore(str(tmp_path / "file")).list()


def test_a_trial_without_a_readable_manifest_is_damaged(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """Nobody takes a trial that has saved for one that has not."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    store.storage.write(manifest.name.key, b"{")
    with pytest.raises(CheckpointDamaged, match=manifest.uuid):
        store.resume_candidates(manifest.trial)
