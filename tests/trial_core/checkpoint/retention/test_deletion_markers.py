"""Deletions: interrupted ones are finished; a protected checkpoint is not deleted in any order."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest

from tests.support.interleaving import all_orders, clear_memory, interleave_all
from tests.support.manifests import LONG_AGO, commit_files, keys_of, stored_keys
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import DELETIONS
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.deletion_markers import (
    Deletion,
    finish_deletions,
    mark_deletion,
    unmark_deleted,
)
from trial_core.checkpoint.retention.protections import Protection, pin
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, CommitConflict


@pytest.fixture
def manifest(local_store: CheckpointStore) -> Manifest:
    """A committed checkpoint that is about to be deleted."""
    manifest = commit_files(local_store)
    mark_deletion(local_store, manifest)
    return manifest


def test_an_interrupted_deletion_is_finished(
    local_store: CheckpointStore, manifest: Manifest
) -> None:
    """Its manifest is deleted, its files are not yet: the next prune deletes them, no others."""
    other = commit_files(local_store, 11)
    local_store.storage.delete(manifest.name.key)
    assert finish_deletions(local_store) == [manifest]
    assert local_store.storage.sizes(DELETIONS) == {}
    assert stored_keys(local_store) == keys_of([other])


def test_a_stale_marker_is_deleted(
    local_store: CheckpointStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pruner died before it deleted anything: the checkpoint stays."""
    assert finish_deletions(local_store) == []
    assert len(local_store.storage.sizes(DELETIONS)) == 1
    pass_time(monkeypatch)
    assert finish_deletions(local_store) == []
    assert local_store.storage.sizes(DELETIONS) == {}
    assert stored_keys(local_store) == keys_of([manifest])


@pytest.mark.parametrize("at", [LONG_AGO, "2031-13-41T25:61:61Z"])
def test_a_fresh_marker_counts_whatever_its_time(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The clock of its pruner is wrong. The storage's clock decides."""
    manifest = commit_files(local_store)
    with monkeypatch.context() as patch:
        patch.setattr("trial_core.checkpoint.retention.deletion_markers.utc_now", lambda: at)
        mark_deletion(local_store, manifest)
    finish_deletions(local_store)
    with pytest.raises(CommitConflict, match="is being deleted"):
        pin(local_store, manifest.uuid)
    pass_time(monkeypatch)
    pin(local_store, manifest.uuid)


@pytest.mark.parametrize("at", [LONG_AGO, "2031-13-41T25:61:61Z"])
def test_without_the_storages_clock_the_marker_tells_its_time(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """An impossible time is no living pruner's."""
    manifest = commit_files(local_store)
    monkeypatch.setattr(Storage, "now", lambda self: None)
    mark_deletion(local_store, manifest)
    with pytest.raises(CommitConflict, match="is being deleted"):
        pin(local_store, manifest.uuid)
    unmark_deleted(local_store, manifest.uuid)
    monkeypatch.setattr("trial_core.checkpoint.retention.deletion_markers.utc_now", lambda: at)
    mark_deletion(local_store, manifest)
    pin(local_store, manifest.uuid)


def pass_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two hours pass by the storage's clock."""
    at = datetime.now(timezone.utc) + timedelta(hours=2)
    monkeypatch.setattr(Storage, "now", lambda self: at)


def test_a_half_written_marker_is_deleted(
    local_store: CheckpointStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is stale. Its pruner died before it deleted anything: the checkpoint stays."""
    (key,) = local_store.storage.sizes(DELETIONS)
    local_store.storage.write(key, b'{"by": "ann')
    pin(local_store, manifest.uuid)
    assert finish_deletions(local_store) == []
    assert list(local_store.storage.sizes(DELETIONS)) == [key]
    pass_time(monkeypatch)
    assert finish_deletions(local_store) == []
    assert local_store.storage.sizes(DELETIONS) == {}
    assert stored_keys(local_store) == keys_of([manifest])


@pytest.mark.usefixtures("manifest")
def test_a_half_written_marker_is_stale_without_the_storages_clock(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no time."""
    (key,) = local_store.storage.sizes(DELETIONS)
    local_store.storage.write(key, b'{"by": "ann')
    monkeypatch.setattr(Storage, "now", lambda self: None)
    finish_deletions(local_store)
    assert local_store.storage.sizes(DELETIONS) == {}


def test_a_marker_whose_manifest_cannot_be_read_stops_no_prune(
    local_store: CheckpointStore, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files are not known: it stays for a person, and so does the checkpoint."""
    (key,) = local_store.storage.sizes(DELETIONS)
    marker = Deletion(by="ann@host", at=utc_now(), manifest="{}")
    local_store.storage.write(key, encode_json(marker))
    assert finish_deletions(local_store) == []
    assert list(local_store.storage.sizes(DELETIONS)) == [key]
    assert stored_keys(local_store) == keys_of([manifest])
    assert f"a deletion is not finished, files may be left: {local_store.url}/{key}" in caplog.text


def test_a_marker_that_names_another_checkpoint_is_ignored(
    local_store: CheckpointStore,
    manifest: Manifest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was copied: the files of that checkpoint, which may be uploading, stay. So does the
    marker, for a person to look at."""
    (key,) = local_store.storage.sizes(DELETIONS)
    data = local_store.storage.read(key) or b""
    local_store.storage.remove(key)
    copied = layout.deletion_key(uuids.uuid4().hex, uuids.uuid4().hex)
    local_store.storage.write(copied, data)
    local_store.storage.delete(manifest.name.key)
    pass_time(monkeypatch)
    assert finish_deletions(local_store) == []
    assert len(stored_keys(local_store)) == len(manifest.files)
    assert list(local_store.storage.sizes(DELETIONS)) == [copied]
    assert f"{copied} is ignored: it names checkpoint {manifest.uuid}" in caplog.text


# ---------------------------------------------------------- deletions and others at the same time

KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
LATEST = RetentionPolicy(save_trial_best=0, save_trial_latest=1)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """A trial that runs, with two checkpoints; its actors read one manifest at a time."""
    monkeypatch.setattr("trial_core.checkpoint.storage.parallel.READ_THREADS", 1)
    monkeypatch.setattr("trial_core.checkpoint.retention.claims.DELETION_WAIT_SECONDS", 0)
    store = CheckpointStore(f"memory://{uuids.uuid4()}")
    yield store
    clear_memory()


def is_of_protocol(verb: str, key: str) -> bool:
    """Whether the order matters: markers, pins, claims, and manifests before and after them."""
    family = key.partition("/")[0]
    return (
        (family == layout.DELETIONS and key != family)
        or (family == layout.PINS and key != family)
        or (family == layout.CLAIMS and (verb == "write" or key == layout.CLAIMS))
        or (family == layout.MANIFESTS and verb == "remove")
    )


def changes(verb: str, key: str) -> bool:
    """As `is_of_protocol`, without reads: few orders show most mistakes."""
    return verb in ("write", "remove") and is_of_protocol(verb, key)


def orders(*variations: tuple[Callable[[str, str], bool], tuple[int, ...]]) -> Any:
    """Parametrize a test with which requests count, and how many each actor sends at most."""
    quick, thorough = variations
    return pytest.mark.parametrize(
        ("counts", "requests"), [quick, pytest.param(*thorough, marks=pytest.mark.long)]
    )


def is_intact(store: CheckpointStore, manifest: Manifest) -> bool:
    """Whether a checkpoint is listed with all its files; if not, it has none."""
    files = len(store.storage.sizes(layout.files_folder(manifest.uuid)))
    is_listed = manifest in store.list()
    assert files == len(manifest.files) * is_listed
    return is_listed


@orders((changes, (2, 3)), (is_of_protocol, (6, 6)))
def test_a_claim_during_a_prune(
    scene: CheckpointStore, counts: Callable[[str, str], bool], requests: tuple[int, ...]
) -> None:
    """In any order of requests a claimed checkpoint stays, or the run learns that it is deleted."""
    seen = set()
    for order in all_orders(*requests):
        source = commit_files(scene)
        plan = plan_pruning(scene, KEEP_NONE, "gpt")

        def start(store: CheckpointStore, source: Manifest = source) -> None:
            claim = RunClaim(store, "other-1", source.uuid)
            claim.__enter__()
            claim.renew(source.name)

        claimed, pruned = interleave_all(
            scene.url, [start, partial(prune, plan=plan)], order, counts
        )
        assert not isinstance(pruned, Exception), pruned
        assert isinstance(claimed, (type(None), CheckpointNotFound, CommitConflict)), claimed
        if claimed is None:
            assert is_intact(scene, source)
        seen.add((type(claimed).__name__, is_intact(scene, source)))
        assert scene.storage.sizes(DELETIONS) == {}
        clear_memory()
    assert {("NoneType", True), ("CheckpointNotFound", False)} <= seen


@orders((changes, (2, 3, 1)), (is_of_protocol, (3, 6, 2)))
def test_a_pin_during_two_prunes(
    scene: CheckpointStore, counts: Callable[[str, str], bool], requests: tuple[int, ...]
) -> None:
    """In any order of requests a pinned checkpoint stays, if one prune spares it anyway."""
    seen = set()
    for order in all_orders(*requests):
        old = commit_files(scene, 7)
        commit_files(scene, 11)
        before = plan_pruning(scene, LATEST, "gpt")
        RunClaim(scene, old.trial).__enter__()
        own = plan_pruning(scene, LATEST, "gpt")
        spared, pruned, pinned = interleave_all(
            scene.url,
            [partial(prune, plan=before), partial(prune, plan=own), partial(pin, uuid=old.uuid)],
            order,
            counts,
        )
        assert not isinstance(spared, Exception), spared
        assert spared.deleted == ()
        assert not isinstance(pruned, Exception), pruned
        assert is_intact(scene, old) == (pruned.deleted == ())
        if isinstance(pinned, Protection):
            assert is_intact(scene, old)
        else:
            assert isinstance(pinned, (CheckpointNotFound, CommitConflict)), pinned
        seen.add((type(pinned).__name__, is_intact(scene, old)))
        assert scene.storage.sizes(DELETIONS) == {}
        clear_memory()
    assert {("Protection", True), ("CheckpointNotFound", False)} <= seen
