"""Credentials of a file that is rewritten while a storage is open. The old ones count no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.manifests import stage
from tests.support.s3 import S3Server
from tests.support.s3_user import S3User, s3_user
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import StorageError

pytestmark = pytest.mark.gateway


@pytest.fixture
def user(ceph_s3: S3Server, tmp_path: Path) -> Iterator[S3User]:
    with s3_user(ceph_s3, tmp_path) as made:
        yield made


def test_a_rewritten_file_counts_at_once(user: S3User, tmp_path: Path) -> None:
    """For small objects, and for all parts of a large file that are sent in parallel."""
    store = CheckpointStore(user.url, user.options)
    store.storage.write("a", b"1")
    user.rotate()
    user.write_file()
    data = os.urandom(40 * 2**20)
    upload_files(store, "u", stage(tmp_path / "staging", {"large": data}), 0)
    user.rotate()
    user.write_file()
    assert store.storage.read("a") == b"1"
    assert store.storage.sizes("checkpoints") == {"checkpoints/u/large": len(data)}


@pytest.mark.long
def test_a_file_without_new_credentials_changes_no_error(user: S3User) -> None:
    """Not written yet, half written, or gone. Once it is written, it counts."""
    storage = open_storage(user.url, user.options)
    storage.write("a", b"1")
    user.rotate()
    for text in ("[default]\naws_access_key_id = x\n", "[default", ""):
        user.write_file(text)
        with pytest.raises(StorageError, match="does not know the access key"):
            storage.write("a", b"2")
    user.write_file()
    storage.write("a", b"3")
    assert storage.read("a") == b"3"


@pytest.mark.long
def test_credentials_of_the_options_are_not_replaced(user: S3User) -> None:
    """The file's are somebody else's."""
    options = {**user.options, "key": user.key, "secret": user.secret}
    storage = open_storage(user.url, options)
    storage.write("a", b"1")
    user.rotate()
    user.write_file()
    with pytest.raises(StorageError, match="does not know the access key"):
        storage.write("a", b"2")


@pytest.mark.long
def test_a_process_is_not_asked_for_each_missing_right(
    user: S3User, ceph_s3: S3Server, tmp_path: Path
) -> None:
    """It is asked again when the server no longer knows its credentials."""
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    user.write_file("")
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = sh -c 'echo >> {asked}; cat {answer}'\n"
    )

    def put_answer() -> None:
        keys = {"AccessKeyId": user.key, "SecretAccessKey": user.secret}
        end = {"Expiration": "2100-01-01T00:00:00Z"}
        answer.write_text(json.dumps({"Version": 1, **keys, **end}))

    put_answer()
    storage = open_storage(user.url, user.options)
    storage.write("a", b"1")
    foreign = open_storage(ceph_s3.new_bucket(), user.options)
    with pytest.raises(StorageError, match="access was refused"):
        foreign.write("a", b"1")
    assert asked.read_text() == "\n"
    user.rotate()
    put_answer()
    storage.write("a", b"2")
    assert asked.read_text() == "\n\n"
