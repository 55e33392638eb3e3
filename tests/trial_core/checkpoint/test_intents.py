from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import FILES, new_manifest, upload
from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import Intent, read_intent
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError
from trial_core.transfer.files import verify_files


def begin(store: CheckpointStore, staging: Path, **fields: Any) -> Manifest:
    """Begin a checkpoint and upload its files; the manifest that would commit it."""
    manifest = upload(store, staging, **fields)
    store.announce_upload(manifest.trial, manifest.uuid, manifest.attempt)
    return manifest


def everything(store: CheckpointStore) -> set[str]:
    """All keys in the store."""
    folders = (layout.MANIFESTS, layout.CHECKPOINTS, layout.UPLOADS, layout.RUNS)
    return {key for folder in folders for key in store.storage.sizes(folder)}


def keys_of(manifest: Manifest) -> set[str]:
    """What a committed checkpoint consists of."""
    files = {layout.file_key(manifest.uuid, each.path) for each in manifest.files}
    return {manifest.name.key, *files}


def test_an_intent_is_there_until_the_commit(store: CheckpointStore, tmp_path: Path) -> None:
    """Whoever begins says so, and who has committed takes it back."""
    manifest = begin(store, tmp_path / "staging")
    said = read_intent(store.storage, manifest.trial, manifest.uuid)
    assert isinstance(said, Intent)
    assert said.attempt == manifest.attempt
    store.commit(manifest)
    assert everything(store) == keys_of(manifest)


def test_a_sweep_deletes_what_was_never_committed(store: CheckpointStore, tmp_path: Path) -> None:
    """Files and intent of a dead run go, committed checkpoints stay whole, and it is said."""
    good = begin(store, tmp_path / "good", batches=3)
    store.commit(good)
    lost = begin(store, tmp_path / "lost", batches=5)
    swept = store.sweep(lost.trial)
    assert [(each.uuid, each.attempt, each.files, each.size_bytes) for each in swept] == [
        (lost.uuid, lost.attempt, len(FILES), lost.total_bytes)
    ]
    assert everything(store) == keys_of(good)
    verify_files(store, good.uuid, good.files)
    assert store.sweep(lost.trial) == []


def test_a_sweep_keeps_off_other_trials(store: CheckpointStore, tmp_path: Path) -> None:
    """The upload under way of another trial is not touched, and can be committed."""
    lost = begin(store, tmp_path / "lost", trial="gpt-1")
    alive = begin(store, tmp_path / "alive", trial="gpt-11")
    store.sweep("gpt-1")
    store.commit(alive)
    assert everything(store) == keys_of(alive)
    assert store.list("gpt-11") == [alive]
    assert lost.uuid not in {manifest.uuid for manifest in store.list()}


def test_a_crash_between_manifest_and_intent_loses_nothing(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is listed is not swept, though its intent was left."""
    manifest = begin(store, tmp_path / "staging")
    with monkeypatch.context() as patch:
        patch.setattr("trial_core.checkpoint.commit._tidy", lambda *_: None)
        store.commit(manifest)
    assert store.sweep(manifest.trial) == []
    assert everything(store) == keys_of(manifest)


def test_half_an_intent_is_swept_as_well(store: CheckpointStore, tmp_path: Path) -> None:
    """Whoever was killed while writing it is as dead as others."""
    lost = upload(store, tmp_path / "staging")
    store.storage.write(layout.intent_key(lost.trial, lost.uuid), b'{"trial": "gp')
    assert [each.uuid for each in store.sweep(lost.trial)] == [lost.uuid]
    assert everything(store) == set()


def test_what_was_swept_cannot_be_committed(store: CheckpointStore, tmp_path: Path) -> None:
    """A driver that was taken for dead, and is not, is told what has become of its files."""
    manifest = begin(store, tmp_path / "staging")
    store.sweep(manifest.trial)
    with pytest.raises(CheckpointError, match="is not committed"):
        store.commit(manifest)
    assert store.list() == []


def test_a_second_try_finds_its_intent(store: CheckpointStore, tmp_path: Path) -> None:
    """It stays as the first try has written it; and is written anew where it was swept."""
    manifest = begin(store, tmp_path / "staging")
    said = read_intent(store.storage, manifest.trial, manifest.uuid)
    store.announce_upload(manifest.trial, manifest.uuid, manifest.attempt)
    assert read_intent(store.storage, manifest.trial, manifest.uuid) == said
    store.sweep(manifest.trial)
    store.announce_upload(manifest.trial, manifest.uuid, manifest.attempt)
    assert read_intent(store.storage, manifest.trial, manifest.uuid) is not None


def test_a_second_try_that_meets_a_sweep_has_an_intent(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first one's is deleted just when it has been found: what is uploaded from now on
    would otherwise be nobody's."""
    manifest = begin(store, tmp_path / "staging")
    create = store.storage.create

    def create_then_sweep(key: str, data: bytes) -> None:
        monkeypatch.undo()
        try:
            create(key, data)
        finally:
            store.sweep(manifest.trial)

    monkeypatch.setattr(store.storage, "create", create_then_sweep)
    store.announce_upload(manifest.trial, manifest.uuid, manifest.attempt)
    assert read_intent(store.storage, manifest.trial, manifest.uuid) is not None


def test_a_trial_without_a_proper_name_is_refused(store: CheckpointStore) -> None:
    """A name that leads out of its folder never becomes a key."""
    with pytest.raises(CheckpointError, match="cannot be a name in the storage"):
        store.announce_upload("../other", "u", "attempt-1")


def leave_open(store: CheckpointStore, key: str) -> None:
    """Begin a multipart upload and send a part, as who is killed then."""
    storage: Any = store.storage
    where = {"Bucket": storage._bucket, "Key": storage._key(key)}
    begun = storage._fs.call_s3("create_multipart_upload", **where)
    upload_id = begun["UploadId"]
    storage._fs.call_s3("upload_part", **where, UploadId=upload_id, PartNumber=1, Body=b"1")


def left_open(store: CheckpointStore) -> set[str]:
    """The keys that a multipart upload is under way for."""
    storage: Any = store.storage
    found = storage._fs.call_s3("list_multipart_uploads", Bucket=storage._bucket)
    return {each["Key"].removeprefix("some/folder/") for each in found.get("Uploads", [])}


def test_a_sweep_ends_uploads_of_parts(s3_store: CheckpointStore) -> None:
    """Those of the trial, beside its checkpoints too, and no others."""
    s3_store.announce_upload("a", "u1", "attempt-1")
    s3_store.announce_upload("a-b", "u2", "attempt-1")
    mine = {"checkpoints/u1/x/deep", "checkpoints/u1/x", "runs/a/tensorboard/rank-0/events"}
    others = {"checkpoints/u2/x", "checkpoints/u11/x", "runs/a-b/x", "elsewhere"}
    for key in (*mine, *others):
        leave_open(s3_store, key)
    leave_open(s3_store, "checkpoints/u1/x")  # twice the same
    assert sum(each.uploads for each in s3_store.sweep("a")) == len(mine) + 1
    assert left_open(s3_store) == others


def test_a_commit_ends_what_its_retries_have_left_open(
    s3_store: CheckpointStore, tmp_path: Path
) -> None:
    """When a checkpoint is listed, nothing of its upload is left beside it."""
    manifest = begin(s3_store, tmp_path / "staging")
    leave_open(s3_store, layout.file_key(manifest.uuid, "a-file"))
    s3_store.commit(manifest)
    assert left_open(s3_store) == set()


def test_many_uploads_of_parts_are_all_found(
    s3_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the server lists a few at a time."""
    from trial_core.storage.s3_requests import S3Requests

    call = S3Requests._call

    async def call_by_twos(requests: S3Requests, name: str, **arguments: Any) -> dict[str, Any]:
        how = {"MaxUploads": 2} if name == "list_multipart_uploads" else {}
        return await call(requests, name, **arguments, **how)

    for number in range(5):
        leave_open(s3_store, f"checkpoints/u/{number}")
    monkeypatch.setattr(S3Requests, "_call", call_by_twos)
    assert s3_store.storage.end_uploads("checkpoints/u") == 5
    assert left_open(s3_store) == set()


def test_a_sweep_takes_files_that_never_got_their_name(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """On local disk a killed upload leaves files under temporary names, and empty folders."""
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


def test_deleting_takes_everything(store: CheckpointStore, tmp_path: Path) -> None:
    """Manifest and files go, those that no manifest lists too; others stay. Twice does no harm."""
    kept, gone = upload(store, tmp_path / "kept"), upload(store, tmp_path / "gone")
    for manifest in (kept, gone):
        store.commit(manifest)
    store.storage.write(layout.file_key(gone.uuid, "stray"), b"1")
    for _ in range(2):
        store.delete(gone)
        assert store.list() == [kept]
        assert everything(store) == keys_of(kept)


def test_the_manifest_goes_first(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed while deleting leaves no checkpoint that is listed and is not whole."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)

    def fail(folder: str) -> None:
        raise StorageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store.storage, "clear", fail)
        with pytest.raises(StorageError, match="killed"):
            store.delete(manifest)
    assert store.list() == []
    store.delete(manifest)
    assert everything(store) == set()


@pytest.mark.parametrize(
    ("stays", "named"), [("manifests/", "manifests/.*json"), ("checkpoints/", "1 of 3 objects")]
)
def test_what_is_not_gone_is_named(
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stays: str,
    named: str,
) -> None:
    """A storage that says yes and keeps an object all the same is not believed."""
    manifest = upload(store, tmp_path / "staging")
    store.commit(manifest)
    delete: Callable[[str], None] = store.storage.delete
    kept: list[str] = []

    def say_yes_once(key: str) -> None:
        if key.startswith(stays) and (not kept or kept == [key]):
            kept[:] = [key]
        else:
            delete(key)

    monkeypatch.setattr(store.storage, "delete", say_yes_once)
    with pytest.raises(StorageError, match=rf"{named}.* still there after .* legal hold"):
        store.delete(manifest)


def test_an_empty_checkpoint_can_be_deleted(store: CheckpointStore) -> None:
    """A manifest without files is deleted like any other."""
    manifest = new_manifest()
    store.commit(manifest)
    store.delete(manifest)
    assert store.list() == []
