"""Files that arrive after the sweep of their intent are swept; files of live uploads never are."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.interleaving import all_orders, clear_memory, interleave_all
from tests.support.manifests import commit_files, put_files, stored_keys
from tests.support.multipart_uploads import leave_open, left_open
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.leftovers import Leftover, find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.protections import Protection
from trial_core.checkpoint.storage.base import Storage, StoredObject
from trial_core.checkpoint.store import CheckpointStore

TRIAL = "gpt-0123abcd"


@pytest.fixture
def much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the storage's clock, everything was written 30 days ago."""
    at = datetime.now(timezone.utc) + timedelta(days=30)
    monkeypatch.setattr(Storage, "now", lambda self: at)


def supersede(store: CheckpointStore) -> Manifest:
    """Sweep an attempt's upload while it uploads: some of its files arrive afterwards."""
    one = store.take_over(TRIAL, "one")
    begun = put_files(store, 11, trial=TRIAL)
    store.announce_upload(TRIAL, begun.uuid, "one", one)
    store.sweep(TRIAL, store.take_over(TRIAL, "two"))
    store.storage.write(layout.file_key(begun.uuid, "late"), b"late")
    return begun


def test_files_that_arrive_after_the_sweep_are_swept(
    store: CheckpointStore, request: pytest.FixtureRequest
) -> None:
    """Once they are old by the storage's clock. Committed checkpoints stay."""
    saved = commit_files(store, 7, trial=TRIAL)
    begun = supersede(store)
    assert find_leftovers(store) == []
    request.getfixturevalue("much_later")
    assert find_leftovers(store, trial=TRIAL) == []
    (found,) = find_leftovers(store)
    assert (found.uuid, found.trial, found.files, found.size_bytes) == (begun.uuid, None, 1, 4)
    assert found.why.startswith("neither committed nor announced; last written at 2")
    told: list[object] = []
    swept = sweep_leftovers(store, [found], on_swept=told.append)
    assert [each.uuid for each in swept.swept] == [begun.uuid]
    assert told == [*swept.swept]
    assert store.list() == [saved]
    assert find_leftovers(store) == []
    assert len(stored_keys(store)) == 1 + len(saved.files)


@pytest.mark.usefixtures("much_later")
def test_an_upload_that_was_never_completed_is_aborted(s3_store: CheckpointStore) -> None:
    """It takes space, and no file shows it. One that an intent announces stays."""
    announced, orphaned = str(uuid.uuid4()), str(uuid.uuid4())
    s3_store.announce_upload(TRIAL, announced, "one")
    for each in (announced, orphaned):
        leave_open(s3_store, layout.file_key(each, "model"))
    (found,) = [each for each in find_leftovers(s3_store) if each.trial is None]
    assert (found.uuid, found.files, found.size_bytes) == (orphaned, 1, 0)
    (swept,) = sweep_leftovers(s3_store, [found]).swept
    assert (swept.uuid, swept.uploads) == (orphaned, 1)
    assert left_open(s3_store) == {layout.file_key(announced, "model")}


def unreadable_manifest(store: CheckpointStore, begun: Manifest) -> None:
    store.storage.write(begun.name.key, b"{")


def renamed_manifest(store: CheckpointStore, begun: Manifest) -> None:
    store.storage.write(f"{begun.name.key}.bak", begun.to_json())


def unreadable_intent(store: CheckpointStore, begun: Manifest) -> None:
    store.storage.write(layout.intent_key(TRIAL, begun.uuid), b"")


def a_pin(store: CheckpointStore, begun: Manifest) -> None:
    pinned = Protection(uuid=begun.uuid, by="", at="")
    store.storage.write(pinned.key, encode_json(pinned))


def a_claim(store: CheckpointStore, begun: Manifest) -> None:
    RunClaim(store, "other-1", source=begun.uuid[:8]).__enter__()


@pytest.mark.usefixtures("much_later")
@pytest.mark.parametrize(
    "protect", [unreadable_manifest, renamed_manifest, unreadable_intent, a_pin, a_claim]
)
def test_files_that_something_names_stay(
    local_store: CheckpointStore, protect: Callable[[CheckpointStore, Manifest], None]
) -> None:
    """Also if it appears after they were listed, or cannot be read."""
    begun = supersede(local_store)
    listed = find_leftovers(local_store)
    protect(local_store, begun)
    sweep_leftovers(local_store, listed)
    sweep_leftovers(local_store, find_leftovers(local_store))
    assert layout.file_key(begun.uuid, "late") in stored_keys(local_store)


@pytest.mark.usefixtures("much_later")
def test_a_persons_folder_stays(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is no checkpoint's. It is named once, however many files it has."""
    commit_files(local_store, uuid="unusual-but-committed")
    for key in ("backup/model", "backup/optimizer", "notes.txt"):
        local_store.storage.write(f"checkpoints/{key}", b"x")
    assert find_leftovers(local_store) == []
    for name in ("backup", "notes.txt"):
        assert caplog.text.count(f"{local_store.url}/checkpoints/{name} is ignored") == 1
    assert "unusual-but-committed" not in caplog.text


def test_a_storage_without_times_keeps_files(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names them."""
    begun = supersede(local_store)
    monkeypatch.setattr(Storage, "now", lambda self: None)
    assert find_leftovers(local_store) == []
    assert f"checkpoints/{begun.uuid} has neither a manifest nor an intent" in caplog.text


@pytest.mark.usefixtures("much_later")
def test_a_file_without_a_time_keeps_all_of_its_checkpoint(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been written just now."""
    begun, objects = supersede(local_store), local_store.storage.objects
    late = layout.file_key(begun.uuid, "late")
    local_store.storage.write(layout.file_key(begun.uuid, "later"), b"later")

    def objects_without_a_time(folder: str) -> dict[str, StoredObject]:
        return {
            key: StoredObject(each.size_bytes, None if key == late else each.modified_at)
            for key, each in objects(folder).items()
        }

    monkeypatch.setattr(local_store.storage, "objects", objects_without_a_time)
    assert find_leftovers(local_store) == []
    assert f"checkpoints/{begun.uuid} has neither a manifest nor an intent" in caplog.text


@pytest.mark.usefixtures("much_later")
def test_a_claim_of_an_empty_name_keeps_nothing(local_store: CheckpointStore) -> None:
    """It would be the beginning of every name."""
    begun = supersede(local_store)
    RunClaim(local_store, "other-1", source="").__enter__()
    assert [each.uuid for each in find_leftovers(local_store)] == [begun.uuid]


@pytest.mark.usefixtures("much_later")
@pytest.mark.parametrize(
    ("requests", "is_every"), [((4, 4), False), pytest.param((6, 7), True, marks=pytest.mark.long)]
)
def test_an_upload_during_a_sweep_is_committed(requests: tuple[int, ...], is_every: bool) -> None:
    """In any order of requests its files stay, however long the upload has taken."""

    def save(store: CheckpointStore) -> Manifest:
        begun = str(uuid.uuid4())
        store.announce_upload(TRIAL, begun, "one")
        manifest = put_files(store, 7, {"model": b"x"}, uuid=begun)
        store.commit(manifest)
        return manifest

    def sweep(store: CheckpointStore) -> list[Leftover]:
        found = find_leftovers(store)
        sweep_leftovers(store, found)
        return [each for each in found if each.trial is None]

    def counts(verb: str, key: str) -> bool:
        is_listing = "/" not in key  # of all files, intents or manifests
        is_file = verb == "write" and key.startswith(layout.CHECKPOINTS)
        return is_every or is_listing or is_file or verb in ("create", "remove")

    for order in all_orders(*requests):
        store = CheckpointStore(f"memory://{uuid.uuid4()}")
        saved, orphaned = interleave_all(store.url, [save, sweep], order, counts)
        assert isinstance(saved, Manifest), saved
        assert orphaned == []
        assert store.verify(saved.uuid) == saved
        clear_memory()
