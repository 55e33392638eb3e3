"""Code is stored once by content, and a copy that may be deleted is not named again."""

from __future__ import annotations

import pytest

from tests.support.manifests import commit_files, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.code_objects import RunCode, read_code
from trial_core.checkpoint.intents import read_intent
from trial_core.checkpoint.manifest import Manifest, StoredCode
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CommitConflict

TRIAL = "gpt-0123abcd"


def announced(store: CheckpointStore, uuid: str, data: bytes, run: RunCode | None = None) -> int:
    """Announce an upload of a run with this code; the number of the copy that it names."""
    code = store.announce_upload(TRIAL, uuid, "one", code=run or RunCode(data))
    assert code is not None
    intent = read_intent(store.storage, TRIAL, uuid)
    assert intent is not None
    assert intent.code == code
    assert read_code(store.storage, code, uuid) == data
    return code.number


def mark(store: CheckpointStore, data: bytes, number: int) -> None:
    """Mark a copy, as a prune does before it deletes the copy."""
    key = layout.code_deletion_key(RunCode(data).digest, number, "0a")
    store.storage.write(key, b"{}")


def test_equal_code_is_stored_once(store: CheckpointStore) -> None:
    """Of all runs and trials; other code is another object."""
    assert [announced(store, uuid, b"code") for uuid in "abc"] == [0, 0, 0]
    assert len(store.storage.sizes(layout.CODE)) == 1
    announced(store, "d", b"other code")
    assert len(store.storage.sizes(layout.CODE)) == 2


def test_a_copy_that_may_be_deleted_is_not_named(local_store: CheckpointStore) -> None:
    """A run that knows it from an earlier checkpoint names another one, too."""
    run = RunCode(b"code")
    assert announced(local_store, "a", b"code", run) == 0
    mark(local_store, b"code", 0)
    assert announced(local_store, "b", b"code", run) == 1
    assert announced(local_store, "c", b"code") == 1


def test_a_repeated_upload_names_the_same_copy(local_store: CheckpointStore) -> None:
    """Its manifest may be stored already, so the bytes must not change."""
    run = RunCode(b"code")
    assert announced(local_store, "a", b"code", run) == 0
    mark(local_store, b"code", 0)
    assert announced(local_store, "a", b"code", run) == 0


def test_prunes_that_never_end(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload gives up with an error that says where to look."""
    for number in range(30):
        mark(local_store, b"code", number)
    copies = iter(range(100))
    monkeypatch.setattr(
        "trial_core.checkpoint.code_objects._unmarked_number", lambda _: next(copies)
    )
    with pytest.raises(CommitConflict, match=r"began to delete its code, .* 20 times"):
        local_store.announce_upload(TRIAL, "a", "one", code=RunCode(b"code"))


def test_half_an_archive_is_written_again(local_store: CheckpointStore) -> None:
    """A writer that was killed has left it."""
    announced(local_store, "a", b"code")
    (key,) = local_store.storage.sizes(layout.CODE)
    local_store.storage.write(key, b"co")
    assert announced(local_store, "b", b"code") == 0


def test_damaged_code_is_not_read(local_store: CheckpointStore) -> None:
    """The error names the object, and both digests or that it is missing."""
    code = local_store.announce_upload(TRIAL, "a", "one", code=RunCode(b"code"))
    assert code is not None
    local_store.storage.write(code.key, b"edoc")
    with pytest.raises(CheckpointDamaged, match=rf"{code.key}, .* is damaged: .* expected sha256"):
        read_code(local_store.storage, code, "a")
    local_store.storage.remove(code.key)
    with pytest.raises(CheckpointDamaged, match=rf"{code.key}, .* is missing"):
        read_code(local_store.storage, code, "a")


def test_a_manifest_names_its_code(local_store: CheckpointStore) -> None:
    """So does the intent during the commit; manifests without it can be read."""
    code = StoredCode(digest="sha256:" + "0a" * 32, size_bytes=7, number=3)
    manifest = commit_files(local_store, code=code)
    assert local_store.open(manifest.uuid).code == code
    assert new_manifest().code is None


def test_a_manifest_of_an_earlier_version_names_none() -> None:
    """Its JSON has neither of the later fields."""
    import msgspec

    from trial_core.checkpoint.manifest import _digest_of

    fields = msgspec.json.decode(new_manifest().to_json())
    for later in ("digest", "code", "config"):
        del fields[later]
    fields["digest"] = _digest_of(fields)
    read = Manifest.from_json(msgspec.json.encode(fields))
    assert (read.code, read.config) == (None, {})
