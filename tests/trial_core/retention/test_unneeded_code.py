"""Code stays as long as a checkpoint or an upload names it, and no longer."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.interleaving import FailingStore, all_orders, interleave_all
from tests.support.manifests import put_files
from tests.trial_core.retention.test_deletion_markers import clear_memory
from trial_core.checkpoint import layout
from trial_core.checkpoint.code_objects import RunCode, read_code
from trial_core.checkpoint.manifest import Manifest, StoredCode
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, StorageError
from trial_core.retention.leftovers import sweep_leftovers
from trial_core.retention.policy import RetentionPolicy
from trial_core.retention.pruning import delete_checkpoint, plan_pruning, prune
from trial_core.retention.unneeded_code import delete_unneeded_code, sweep_unneeded_code

KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
LATEST = RetentionPolicy(save_trial_best=0, save_trial_latest=1)
OLD, NEW = b"old code", b"new code"


def save(store: CheckpointStore, batches: int, data: bytes, **fields: Any) -> Manifest:
    """Upload and commit a checkpoint of a run with this code."""
    manifest = put_files(store, batches, **fields)
    code = store.announce_upload(
        manifest.trial, manifest.uuid, manifest.attempt, code=RunCode(data)
    )
    named = put_files(store, batches, **fields, uuid=manifest.uuid, code=code)
    store.commit(named)
    return named


def archives(store: CheckpointStore) -> int:
    return len(store.storage.sizes(layout.CODE))


def code_of(manifest: Manifest) -> StoredCode:
    assert manifest.code is not None
    return manifest.code


def test_code_goes_with_the_last_checkpoint_that_names_it(local_store: CheckpointStore) -> None:
    """Not before, and also if a checkpoint of another trial or experiment is the last."""
    save(local_store, 1, OLD)
    other = save(local_store, 2, OLD, trial="other-1", experiment="other")
    last = save(local_store, 3, NEW)
    prune(local_store, plan_pruning(local_store, LATEST, "gpt"))
    assert local_store.list() == [other, last]
    assert archives(local_store) == 2
    prune(local_store, plan_pruning(local_store, KEEP_NONE, "other"))
    assert list(local_store.storage.sizes(layout.CODE)) == [code_of(last).key]


def test_a_prune_that_deletes_code_reads_the_other_checkpoints_once(
    local_store: CheckpointStore,
) -> None:
    """Many deleted checkpoints with the same code cost one look, not one each."""
    for batches in range(1, 9):
        save(local_store, batches, OLD)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    counting = FailingStore(local_store, nth=10**9)
    prune(counting, plan)
    deletion = counting.requests / 8
    assert archives(local_store) == 0
    assert deletion < 14


def test_a_kept_checkpoint_with_the_same_code_costs_no_look(local_store: CheckpointStore) -> None:
    """The prune after each commit of a run does not read all manifests of the storage."""
    save(local_store, 1, OLD)
    save(local_store, 2, OLD)
    plan = plan_pruning(local_store, LATEST, "gpt")
    asked: list[str] = []
    sizes = local_store.storage.sizes
    local_store.storage.sizes = lambda folder: asked.append(folder) or sizes(folder)  # type: ignore[method-assign,func-returns-value]
    prune(local_store, plan)
    assert layout.MANIFESTS not in asked
    assert archives(local_store) == 1


def test_code_of_an_upload_in_progress_stays(local_store: CheckpointStore) -> None:
    """Its intent names the code before the manifest does."""
    begun = put_files(local_store, 5, trial="other-1")
    local_store.announce_upload("other-1", begun.uuid, "two", code=RunCode(OLD))
    save(local_store, 1, OLD)
    prune(local_store, plan_pruning(local_store, KEEP_NONE, "gpt"))
    assert archives(local_store) == 1


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("uploads/other-1/u-1.json", "is not a readable Intent"),
        ("manifests/other-1/0000000007-u-1.json", "no code is deleted"),
    ],
)
def test_an_unreadable_object_protects_all_code(
    local_store: CheckpointStore, key: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may name any; a warning says which object that is."""
    local_store.storage.write(key, b"{}")
    save(local_store, 1, OLD)
    prune(local_store, plan_pruning(local_store, KEEP_NONE, "gpt"))
    assert archives(local_store) == 1
    assert message in caplog.text
    assert key in caplog.text


def test_code_that_was_never_named_is_swept_with_leftovers(local_store: CheckpointStore) -> None:
    """A run was killed before its first commit, and the trial's next run has other code."""
    local_store.announce_upload("gpt-1", "u-1", "one", code=RunCode(OLD))
    local_store.sweep("gpt-1")
    kept = save(local_store, 1, NEW)
    sweep_leftovers(local_store, [])
    assert list(local_store.storage.sizes(layout.CODE)) == [code_of(kept).key]


@pytest.mark.parametrize("is_done", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_prune_that_fails_anywhere(local_store: CheckpointStore, is_done: bool) -> None:
    """The next prune deletes the code, and no checkpoint is ever without its code."""
    failed = 0
    for nth in range(1, 60):
        manifest = save(local_store, nth, OLD)
        plan = plan_pruning(local_store, KEEP_NONE, "gpt")
        store = FailingStore(local_store, nth, is_done)
        try:
            prune(store, plan)
        except StorageError:
            failed += 1
        for each in local_store.list():
            assert read_code(local_store.storage, code_of(each), each.uuid) == OLD
        prune(local_store, plan_pruning(local_store, KEEP_NONE, "gpt"))
        sweep_unneeded_code(local_store)
        assert manifest not in local_store.list()
        stored = local_store.storage.sizes(layout.CODE)
        assert [key for key in stored if key.endswith(".tar")] == []
        if not store.has_failed:
            break
    assert failed > 5


# ------------------------------------------------------------ deletions and uploads at once


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """A storage whose actors read one manifest at a time."""
    monkeypatch.setattr("trial_core.retention.unneeded_code._READ_THREADS", 1)
    store = CheckpointStore(f"memory://{uuids.uuid4()}")
    yield store
    clear_memory()


def is_of_protocol(verb: str, key: str) -> bool:
    """Whether the order matters: markers and archives, intents, and manifests."""
    family = key.partition("/")[0]
    return (
        (family == layout.CODE and verb != "objects")
        or (family == layout.UPLOADS and verb in ("write", "create", "remove", "sizes"))
        or (family == layout.MANIFESTS and verb in ("create", "sizes"))
    )


def changes(verb: str, key: str) -> bool:
    """As `is_of_protocol`, with the looks at the other side alone: few orders show most mistakes.

    The upload: its intent, its look for markers, the archive. The deletion: its marker, its look
    for intents, the archive.
    """
    family = key.partition("/")[0]
    return (family == layout.CODE and not (verb == "remove" and key.endswith(".json"))) or (
        family == layout.UPLOADS and verb in ("create", "sizes")
    )


def commits(verb: str, key: str) -> bool:
    """A commit, which replaces the intent by the manifest, and the deletion's looks at both."""
    family = key.partition("/")[0]
    return (family == layout.UPLOADS and verb in ("remove", "sizes")) or (
        family == layout.MANIFESTS and (verb == "create" or key == family)
    )


def upload(store: CheckpointStore, manifest: Manifest) -> Manifest:
    code = store.announce_upload(manifest.trial, manifest.uuid, manifest.attempt, code=RunCode(OLD))
    named = put_files(store, 5, trial=manifest.trial, uuid=manifest.uuid, code=code)
    store.commit(named)
    return named


@pytest.mark.parametrize(
    ("counts", "requests"),
    [
        (changes, (4, 4)),
        (commits, (2, 4)),
        pytest.param(is_of_protocol, (8, 7), marks=pytest.mark.long),
    ],
)
def test_an_upload_during_a_deletion(
    scene: CheckpointStore, counts: Callable[[str, str], bool], requests: tuple[int, ...]
) -> None:
    """In any order of requests, a committed checkpoint has its code."""
    seen = set()
    for order in all_orders(*requests):
        code = scene.announce_upload("gone-1", "u-1", "one", code=RunCode(OLD))
        scene.sweep("gone-1")
        assert code is not None
        begun = put_files(scene, 5, trial="new-1")
        saved, deleted = interleave_all(
            scene.url,
            [partial(upload, manifest=begun), partial(delete_unneeded_code, codes=[code])],
            order,
            counts,
        )
        assert isinstance(saved, Manifest), saved
        assert not isinstance(deleted, Exception), deleted
        assert read_code(scene.storage, code_of(saved), saved.uuid) == OLD
        seen.add((code_of(saved).number, bool(deleted)))
        assert not [key for key in scene.storage.sizes(layout.CODE) if key.endswith(".json")]
        clear_memory()
    if counts is not commits:
        # Kept; deleted before the upload; deleted, and the upload names another copy.
        assert seen >= {(0, False), (0, True), (1, True)}


@pytest.mark.parametrize(
    ("counts", "requests"),
    [(changes, (2, 3, 3)), pytest.param(changes, (3, 3, 3), marks=pytest.mark.long)],
)
def test_an_upload_during_two_deletions(
    scene: CheckpointStore, counts: Callable[[str, str], bool], requests: tuple[int, ...]
) -> None:
    """A deletion that ends removes its own marker only, so the other one is still seen."""
    for order in all_orders(*requests):
        code = scene.announce_upload("gone-1", "u-1", "one", code=RunCode(OLD))
        scene.sweep("gone-1")
        assert code is not None
        begun = put_files(scene, 5, trial="new-1")
        delete = partial(delete_unneeded_code, codes=[code])
        saved, *deleted = interleave_all(
            scene.url, [partial(upload, manifest=begun), delete, delete], order, counts
        )
        assert isinstance(saved, Manifest), saved
        assert not [each for each in deleted if isinstance(each, CheckpointError)], deleted
        assert read_code(scene.storage, code_of(saved), saved.uuid) == OLD
        clear_memory()


def test_the_code_of_a_checkpoint_that_a_script_deletes_goes_too(
    local_store: CheckpointStore,
) -> None:
    """Once no other checkpoint names it."""
    one, two = save(local_store, 1, OLD), save(local_store, 2, OLD)
    delete_checkpoint(local_store, one)
    assert archives(local_store) == 1
    delete_checkpoint(local_store, two)
    assert archives(local_store) == 0
    assert local_store.storage.sizes(layout.DELETIONS) == {}
