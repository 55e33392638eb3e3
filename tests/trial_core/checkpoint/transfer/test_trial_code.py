"""Each checkpoint has its own copy of its trial's code, which is one of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.manifests import commit_with_code, keys_of, put_files, stored_keys
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import checkpoint_source, trial_code
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.code_folder import pack_code
from trial_core.checkpoint.transfer.fetch import download
from trial_core.checkpoint.transfer.trial_code import TrialCode, code_of_checkpoint, upload_code
from trial_core.errors import CheckpointDamaged, CheckpointNotFound


def packed(folder: Path) -> bytes:
    """The archive of a small code folder."""
    folder.mkdir()
    (folder / "model.py").write_text("x = 1")
    data = pack_code(folder).data
    assert data is not None
    return data


def test_code_is_verified_and_downloaded_as_the_other_files(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """Its bytes count, and it can be unpacked."""
    archive = packed(tmp_path / "packed")
    manifest = commit_with_code(store, code=archive)
    assert store.verify(manifest.uuid) == manifest
    assert manifest.total_bytes == sum(file.size_bytes for file in manifest.files) + len(archive)
    download(store, manifest.uuid, tmp_path / "downloaded")
    assert (tmp_path / "downloaded" / layout.CODE_NAME).read_bytes() == archive
    found = code_of_checkpoint(CheckpointSource(manifest, store), tmp_path / "code")
    assert manifest.code is not None
    assert (found.archive, found.digest) == (archive, manifest.code.digest)
    assert (tmp_path / "code" / "model.py").read_text() == "x = 1"


@pytest.mark.parametrize("data", [None, b"edoc", b"co"])
def test_damaged_code_concerns_one_checkpoint_alone(
    local_store: CheckpointStore, tmp_path: Path, data: bytes | None
) -> None:
    """Earlier and later checkpoints with the same code are intact."""
    archive = packed(tmp_path / "packed")
    first, damaged, last = (commit_with_code(local_store, n, archive) for n in (1, 2, 3))
    key = layout.file_key(damaged.uuid, layout.CODE_NAME)
    if data is None:
        local_store.storage.remove(key)
    else:
        local_store.storage.write(key, data + archive[len(data) :] if data == b"edoc" else data)
    with pytest.raises(CheckpointDamaged, match=layout.CODE_NAME):
        local_store.verify(damaged.uuid)
    with pytest.raises(CheckpointDamaged, match=layout.CODE_NAME):
        code_of_checkpoint(CheckpointSource(damaged, local_store), tmp_path / "code")
    with pytest.raises(CheckpointDamaged, match=layout.CODE_NAME):
        download(local_store, damaged.uuid, tmp_path / "downloaded")
    for intact in (first, last):
        assert local_store.verify(intact.uuid) == intact
        assert (
            code_of_checkpoint(CheckpointSource(intact, local_store), tmp_path / "code").archive
            == archive
        )


def test_code_of_any_size_is_not_fetched(
    local_store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is in the manifest: it is refused by name before a byte of it is read."""
    manifest = commit_with_code(local_store, code=packed(tmp_path / "packed"))
    monkeypatch.setattr(trial_code, "MAX_ARCHIVE_BYTES", 2048)
    monkeypatch.setattr(checkpoint_source, "fetch_files", None)
    with pytest.raises(CheckpointDamaged, match=rf"{manifest.uuid} has 10\.0 KiB, and trialflow"):
        code_of_checkpoint(CheckpointSource(manifest, local_store), tmp_path / "code")


def test_a_checkpoint_without_its_code_is_not_committed(local_store: CheckpointStore) -> None:
    """As one without any other of its files."""
    lost = put_files(local_store)
    code = upload_code(local_store, lost.uuid, b"code")
    lost = put_files(local_store, uuid=lost.uuid, code=code)
    local_store.storage.remove(layout.file_key(lost.uuid, layout.CODE_NAME))
    with pytest.raises(CheckpointDamaged, match=f"{layout.CODE_NAME}, written by rank 0, is missi"):
        local_store.commit(lost)
    with pytest.raises(CheckpointNotFound):
        local_store.open(lost.uuid)


def test_code_is_deleted_with_its_checkpoint(local_store: CheckpointStore) -> None:
    """By a prune, and by a sweep if the checkpoint was never committed."""
    commit_with_code(local_store, 1)
    kept = commit_with_code(local_store, 2)
    local_store.announce_upload(kept.trial, "u-1", "one")
    upload_code(local_store, "u-1", b"code")
    (swept,) = local_store.sweep(kept.trial)
    assert (swept.uuid, swept.files) == ("u-1", 1)
    latest = RetentionPolicy(save_trial_best=0, save_trial_latest=1)
    prune(local_store, plan_pruning(local_store, latest, "gpt"))
    assert stored_keys(local_store) == keys_of([kept])


def test_no_code_is_no_file(local_store: CheckpointStore) -> None:
    """A notebook has no code folder."""
    assert upload_code(local_store, "u-1", None) is None
    assert TrialCode(Path("nowhere")).digest == ""
    assert stored_keys(local_store) == set()
