"""Leftovers of killed uploads are found by their intents and swept; nothing else is."""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.manifests import FILES, keys_of, stored_keys, upload
from tests.support.multipart_uploads import leave_open, left_open
from tests.support.storage_clock import shift_clock
from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import read_intent
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage.local_files import atomic_file
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError


def begin(store: CheckpointStore, staging: Path, **fields: Any) -> Manifest:
    """Announce a checkpoint and upload its files; the manifest to commit."""
    manifest = upload(store, staging, **fields)
    store.announce_upload(manifest.trial, manifest.uuid, manifest.writer)
    return manifest


def test_an_intent_lasts_until_the_commit(local_store: CheckpointStore, tmp_path: Path) -> None:
    """It names the attempt; the commit deletes it."""
    manifest = begin(local_store, tmp_path / "staging")
    intent = read_intent(local_store.storage, manifest.trial, manifest.uuid)
    assert intent is not None
    assert intent.writer == manifest.writer
    local_store.commit(manifest)
    assert stored_keys(local_store) == keys_of([manifest])


def test_a_sweep_deletes_uncommitted_uploads(store: CheckpointStore, tmp_path: Path) -> None:
    """A dead run's files and intent are deleted and reported; committed checkpoints stay."""
    good = begin(store, tmp_path / "good", batches=3)
    store.commit(good)
    lost = begin(store, tmp_path / "lost", batches=5)
    swept = store.sweep(lost.trial)
    assert [(each.uuid, each.writer, each.files, each.size_bytes) for each in swept] == [
        (lost.uuid, lost.writer, len(FILES), lost.total_bytes)
    ]
    assert stored_keys(store) == keys_of([good])
    assert store.find_damage(good.uuid, good.files) == []
    assert store.sweep(lost.trial) == []


def test_a_sweep_leaves_other_trials_alone(local_store: CheckpointStore, tmp_path: Path) -> None:
    """An upload of a trial whose name begins alike can still be committed."""
    begin(local_store, tmp_path / "lost", trial="gpt-1")
    alive = begin(local_store, tmp_path / "alive", trial="gpt-11")
    local_store.sweep("gpt-1")
    local_store.commit(alive)
    assert stored_keys(local_store) == keys_of([alive])
    assert local_store.list() == [alive]


def test_a_crash_between_manifest_and_intent_loses_nothing(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committed checkpoint whose intent is left is not swept; the intent is."""
    manifest = begin(local_store, tmp_path / "staging")
    with monkeypatch.context() as patch:
        patch.setattr("trial_core.checkpoint.commit._tidy", lambda *_: None)
        local_store.commit(manifest)
    assert local_store.sweep(manifest.trial) == []
    assert stored_keys(local_store) == keys_of([manifest])


def test_a_half_written_intent_is_swept(local_store: CheckpointStore, tmp_path: Path) -> None:
    """An unreadable intent still names its checkpoint by its key."""
    lost = upload(local_store, tmp_path / "staging")
    local_store.storage.write(layout.intent_key(lost.trial, lost.uuid), b'{"trial": "gp')
    assert [each.uuid for each in local_store.sweep(lost.trial)] == [lost.uuid]
    assert stored_keys(local_store) == set()


def test_a_swept_checkpoint_cannot_be_committed(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A driver without a fence that was presumed dead gets an error."""
    manifest = begin(local_store, tmp_path / "staging")
    local_store.sweep(manifest.trial)
    with pytest.raises(CheckpointError, match="is not committed"):
        local_store.commit(manifest)
    assert local_store.list() == []


def test_nothing_is_committed_while_its_files_are_deleted(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep has first taken the manifest's key, which the intent of a commit names."""
    manifest, storage = begin(local_store, tmp_path / "staging"), local_store.storage
    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", Mock(side_effect=KeyboardInterrupt))  # killed there
        with pytest.raises(KeyboardInterrupt):
            local_store.commit(manifest)
    clear = storage.clear

    def commit_then_clear(folder: str, keep: Collection[str]) -> tuple[int, int]:
        with pytest.raises(CheckpointError, match="is not committed"):
            local_store.commit(manifest)
        return clear(folder, keep)

    monkeypatch.setattr(storage, "clear", commit_then_clear)
    assert [each.uuid for each in local_store.sweep(manifest.trial)] == [manifest.uuid]
    assert local_store.list() == []


def test_a_retry_keeps_its_intent(local_store: CheckpointStore, tmp_path: Path) -> None:
    """A second announcement leaves the intent as it is, and writes it again if it was swept."""
    manifest = begin(local_store, tmp_path / "staging")
    intent = read_intent(local_store.storage, manifest.trial, manifest.uuid)
    local_store.announce_upload(manifest.trial, manifest.uuid, manifest.writer)
    assert read_intent(local_store.storage, manifest.trial, manifest.uuid) == intent
    local_store.sweep(manifest.trial)
    local_store.announce_upload(manifest.trial, manifest.uuid, manifest.writer)
    assert read_intent(local_store.storage, manifest.trial, manifest.uuid) is not None


def test_a_retry_during_a_sweep_has_an_intent(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep deletes the first intent just after the retry has found it: it is written again."""
    manifest = begin(local_store, tmp_path / "staging")
    create = local_store.storage.create

    def create_then_sweep(key: str, data: bytes) -> None:
        monkeypatch.undo()
        try:
            create(key, data)
        finally:
            local_store.sweep(manifest.trial)

    monkeypatch.setattr(local_store.storage, "create", create_then_sweep)
    local_store.announce_upload(manifest.trial, manifest.uuid, manifest.writer)
    assert read_intent(local_store.storage, manifest.trial, manifest.uuid) is not None


def test_an_invalid_trial_name_is_refused(local_store: CheckpointStore) -> None:
    """A name that leads out of its folder never becomes a key."""
    with pytest.raises(CheckpointError, match=r"^'\.\./other' cannot be a trial's id"):
        local_store.announce_upload("../other", "u", "attempt-1")


# ---------------------------------------------------------------------------- partial uploads


def test_a_sweep_aborts_multipart_uploads(s3_store: CheckpointStore) -> None:
    """Those of the trial's checkpoints and run files, and no others."""
    s3_store.announce_upload("a", "u1", "attempt-1")
    s3_store.announce_upload("a-b", "u2", "attempt-1")
    mine = {"checkpoints/u1/x/deep", "checkpoints/u1/x", "runs/a/tensorboard/rank-0/events"}
    others = {"checkpoints/u2/x", "checkpoints/u11/x", "runs/a-b/x", "elsewhere"}
    for key in (*mine, *others):
        leave_open(s3_store, key)
    leave_open(s3_store, "checkpoints/u1/x")  # a second upload of the same key
    swept = s3_store.sweep("a")
    assert sum(each.uploads for each in swept) == len(mine) + 1
    assert str(swept[-1]).endswith("0 files of 0 bytes, and 1 partial upload")
    assert left_open(s3_store) == others


def test_a_commit_aborts_multipart_uploads(s3_store: CheckpointStore, tmp_path: Path) -> None:
    """Retries may have left some; none stays beside a committed checkpoint."""
    manifest = begin(s3_store, tmp_path / "staging")
    leave_open(s3_store, layout.file_key(manifest.uuid, "a-file"))
    s3_store.commit(manifest)
    assert left_open(s3_store) == set()


def test_multipart_uploads_are_listed_page_by_page(
    s3_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are aborted if the server lists two at a time."""
    from trial_core.checkpoint.storage.s3_requests import S3Requests

    call = S3Requests.call

    async def call_by_twos(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        limit = {"MaxUploads": 2} if name == "list_multipart_uploads" else {}
        return await call(requests, name, **arguments, **limit)

    for number in range(5):
        leave_open(s3_store, f"checkpoints/u/{number}")
    monkeypatch.setattr(S3Requests, "call", call_by_twos)
    assert s3_store.storage.abort_uploads("checkpoints/u") == 5
    assert left_open(s3_store) == set()


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_sweep_leaves_what_its_attempt_writes(
    store: CheckpointStore, kind: str, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """What began before the attempt is left by a dead one, by the storage's own clock."""
    if kind == "memory":
        pytest.skip("has no unfinished uploads")
    if kind == "s3":  # its clock has whole seconds, and moto begins every upload in 2010
        days = 1 if begins == "before" else -10_000
        shift_clock(monkeypatch, store.storage, timedelta(days=days))
    key = layout.run_file_key("gpt-1", "tensorboard/rank-0/events")
    if begins == "before":
        leave_half(store, key)
    fence = store.take_over("gpt-1", "two")
    if begins == "after":
        leave_half(store, key)
    swept = sum(each.uploads for each in store.sweep("gpt-1", fence))
    assert (swept, halves(store)) == ((1, 0) if begins == "before" else (0, 1))


def test_the_ledger_may_be_written_during_a_sweep(local_store: CheckpointStore) -> None:
    """The attempt's own file is stored, although the sweep meets it half written."""
    fence = local_store.take_over("gpt-1", "one")
    root, key = local_store.url.removeprefix("file://"), layout.ledger_key("gpt-1", fence.number)
    with atomic_file(Path(root, key), is_durable=True) as file:
        file.write(b"the time until now")
        assert local_store.sweep("gpt-1", fence) == []
    assert local_store.storage.read(key) == b"the time until now"


def leave_half(store: CheckpointStore, key: str) -> None:
    """Begin to write an object."""
    if store.url.startswith("s3"):
        leave_open(store, key)
    else:
        path = Path(store.url.removeprefix("file://"), key).with_name(f".{'0' * 32}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")


def halves(store: CheckpointStore) -> int:
    """How many objects are half written."""
    is_s3 = store.url.startswith("s3")
    return len(left_open(store) if is_s3 else store.storage.sizes(layout.RUNS))


def test_a_sweep_deletes_temporary_files(local_store: CheckpointStore, tmp_path: Path) -> None:
    """A killed upload to a local folder leaves temporary files and empty folders."""
    lost = begin(local_store, tmp_path / "staging")
    root = tmp_path / "local"
    part = f".{'0' * 32}.part"
    for folder in (f"checkpoints/{lost.uuid}/zero", f"manifests/{lost.trial}", "manifests/other"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / part).write_bytes(b"half")
    local_store.sweep(lost.trial)
    left = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert left == [f"manifests/other/{part}"]
    assert os.listdir(root / "checkpoints") == []
