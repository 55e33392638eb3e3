"""Against a real S3 gateway: what moto only imitates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.manifests import FILES, stored_files, upload
from tests.support.s3 import S3Server
from tests.trial_core.checkpoint.test_store import commit_at_once, rivals
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CommitConflict, StorageError
from trial_core.transfer.files import download

pytestmark = pytest.mark.gateway


@pytest.fixture
def store(ceph_s3: S3Server, engine: str) -> CheckpointStore:
    return CheckpointStore(f"{ceph_s3.new_bucket()}/folder", ceph_s3.options)


def test_a_checkpoint_goes_up_and_comes_back(store: CheckpointStore, tmp_path: Path) -> None:
    """Try the storage, upload one part and several, commit, list, download, find damage."""
    files = {**FILES, "big": os.urandom(40 * 2**20 + 13)}
    store.check_writable()
    manifest = upload(store, tmp_path / "staging", files)
    assert store.list() == []
    store.commit(manifest)
    assert store.list() == [manifest]
    download(store, manifest.uuid, tmp_path / "target")
    assert stored_files(tmp_path / "target") == {**files, "manifest.json": manifest.to_json()}
    store.storage.write(layout.file_key(manifest.uuid, "big"), b"short")
    with pytest.raises(CheckpointDamaged, match="big, written by rank 3, has 5 bytes"):
        download(store, manifest.uuid, tmp_path / "again")


def test_of_writers_at_once_one_wins(store: CheckpointStore) -> None:
    """Sixteen commits race, one wins, and it is what is stored."""
    manifests = rivals(16)
    winners = commit_at_once(store, manifests)
    assert winners == [store.open(manifests[0].uuid).attempt]


def test_a_retry_is_told_from_a_conflict(store: CheckpointStore) -> None:
    """The gateway answers both with the same error; what is stored tells them apart."""
    first, second = rivals(2)
    store.commit(first)
    store.commit(first)
    with pytest.raises(CommitConflict):
        store.commit(second)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"key": "nobody-here"}, "access key is not known"), ({"secret": "wrong"}, "does not fit")],
)
def test_wrong_credentials_are_explained(
    store: CheckpointStore, ceph_s3: S3Server, wrong: dict[str, str], why: str
) -> None:
    """Which half is wrong is said, neither is shown."""
    with pytest.raises(StorageError, match=why) as caught:
        CheckpointStore(store.url, {**ceph_s3.options, **wrong}).check_writable()
    assert ceph_s3.secret_key not in str(caught.value)
