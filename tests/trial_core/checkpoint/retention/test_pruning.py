"""Pruning deletes what the rules do not keep, and nothing else, whatever fails."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.interleaving import FailingStore, interleave
from tests.support.manifests import (
    FILES,
    LONG_AGO,
    commit_files,
    leave_unfinished_upload,
    new_manifest,
    stored_keys,
    upload,
)
from tests.support.storage_clock import shift_clock
from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import Intent
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention import deletion_markers, pruning
from trial_core.checkpoint.retention.claims import Claim, RunClaim
from trial_core.checkpoint.retention.leftovers import find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.protections import pin, unpin
from trial_core.checkpoint.retention.pruning import (
    describe,
    experiments,
    plan_pruning,
    prune,
    prune_trial,
)
from trial_core.checkpoint.retention_policy import RetentionDecision, RetentionPolicy
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError

LATEST = RetentionPolicy(save_trial_best=0, save_trial_latest=1)
KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


def memory() -> CheckpointStore:
    return CheckpointStore(f"memory://{uuid.uuid4()}")


def apply(store: CheckpointStore, policy: RetentionPolicy = LATEST, **asked: Any) -> list[Manifest]:
    """Plan and prune; the deleted checkpoints."""
    return [*prune(store, plan_pruning(store, policy, "gpt", **asked)).deleted]


def assert_clean(store: CheckpointStore) -> None:
    """Listed checkpoints are intact, and there are no other files and no deletion markers."""
    listed = store.list()
    assert [damage for each in listed for damage in store.find_damage(each.uuid, each.files)] == []
    folders = {key.split("/")[1] for key in store.storage.sizes(layout.CHECKPOINTS)}
    assert folders == {manifest.uuid for manifest in listed}
    assert store.storage.sizes(layout.DELETIONS) == {}


def test_a_prune_deletes_what_the_rules_do_not_keep(store: CheckpointStore) -> None:
    """Manifest and files; other checkpoints and experiments stay."""
    old, new = commit_files(store, 7), commit_files(store, 11)
    others = [commit_files(store, n, trial="other-1", experiment="other") for n in (3, 5)]
    assert apply(store) == [old]
    assert store.list() == [*others, new]
    assert_clean(store)


def test_a_plan_changes_nothing(local_store: CheckpointStore) -> None:
    """It says what would be deleted, its size, and why."""
    old, new = commit_files(local_store, 7), commit_files(local_store, 11)
    plan = plan_pruning(local_store, LATEST, "gpt")
    assert [decision.manifest for decision in plan.deletions] == [old]
    assert [decision.manifest for decision in plan.kept] == [new]
    assert plan.freed_bytes == sum(map(len, FILES.values()))
    assert [(row["action"], row["why"]) for row in plan.rows()] == [
        ("delete", "2nd latest, and 1 is kept"),
        ("keep", "latest of its trial"),
    ]
    assert local_store.list() == [old, new]


def test_one_trial_can_be_pruned(local_store: CheckpointStore) -> None:
    """The other trials' checkpoints stay, and count for the best of the experiment."""

    def validated(batches: int, loss: float) -> dict[str, Any]:
        progress = new_manifest(batches).progress.after_validation(loss, smaller_is_better=True)
        return {"progress": progress, "metrics": {"validation": {"loss": loss}}}

    mine = [
        commit_files(local_store, n, trial="mine-1", **validated(n, loss=n / 10)) for n in (7, 11)
    ]
    for n in (5, 3):
        commit_files(local_store, n, trial="other-1", **validated(n, loss=0.1))
    commit_files(local_store, 2, trial="other-1", **validated(2, loss=2.0))  # not of the best
    policy = RetentionPolicy(0, 0, save_experiment_best=2, metric="loss")
    assert apply(local_store, policy, trial="mine-1") == mine
    assert len(local_store.list("other-1")) == 3


def test_a_running_trial_is_pruned_after_each_commit(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Each deletion is logged. Whatever the storage does, the run continues."""
    old, new = commit_files(local_store, 7), commit_files(local_store, 11)
    logger, deleted = logging.getLogger(__name__), list[str]()
    caplog.set_level(logging.INFO)
    prune_trial(FailingStore(local_store, nth=1), LATEST, "gpt", old.trial, logger)
    assert "the next checkpoint's prune tries again: the storage broke down" in caplog.text
    prune_trial(local_store, LATEST, "gpt", old.trial, logger, deleted.append)
    assert local_store.list() == [new]
    assert deleted == [old.uuid]
    assert f"deleted checkpoint {old.uuid} of {old.trial} @7, {old.total_bytes} by" in caplog.text
    assert describe(RetentionDecision(new, keep=True, why="")).startswith("kept checkpoint")


def test_a_renamed_experiment_owns_the_whole_trial(local_store: CheckpointStore) -> None:
    """A trial belongs to the experiment of its last checkpoint, also with its older ones."""
    old = commit_files(local_store, 7, experiment="old name")
    commit_files(local_store, 11)
    assert experiments(local_store) == ["gpt"]
    assert plan_pruning(local_store, KEEP_NONE, "old name").decisions == ()
    assert apply(local_store) == [old]


def test_an_unreadable_manifest_is_left_alone(local_store: CheckpointStore) -> None:
    """Nothing is decided about its checkpoint."""
    old = commit_files(local_store, 7)
    commit_files(local_store, 11)
    local_store.storage.write(old.name.key, b"{}")
    assert apply(local_store) == []
    assert len(local_store.storage.sizes(layout.files_folder(old.uuid))) == len(FILES)


def test_pins_and_claims_keep_checkpoints(local_store: CheckpointStore) -> None:
    """A pinned checkpoint, another trial's source, and the newest of a running trial all stay."""
    pinned, source, _, newest = [commit_files(local_store, n) for n in (7, 11, 13, 17)]
    pin(local_store, pinned.uuid, "figure 3", by="ann@here")
    with (
        RunClaim(local_store, newest.trial),
        RunClaim(local_store, "other-1", source=source.uuid[:8]),
    ):
        plan = plan_pruning(local_store, KEEP_NONE, "gpt")
        assert [decision.why.partition(",")[0] for decision in plan.kept] == [
            "pinned by ann@here: figure 3",
            "trial other-1 runs",
            "its trial runs",
        ]
    assert len(plan_pruning(local_store, KEEP_NONE, "gpt").kept) == 1


def test_checkpoints_needed_since_the_plan_are_spared(local_store: CheckpointStore) -> None:
    """By a pin, or by a run that has started from them."""
    pinned, source, old = [commit_files(local_store, n) for n in (7, 11, 13)]
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    pin(local_store, pinned.uuid)
    with RunClaim(local_store, "other-1") as claim:
        claim.renew(source.name)
        pruned = prune(local_store, plan)
    assert pruned.deleted == (old,)
    assert [decision.manifest for decision in pruned.spared] == [pinned, source]
    assert_clean(local_store)


def claimed(store: CheckpointStore, trial: str) -> None:
    RunClaim(store, trial).__enter__()


def uploading(store: CheckpointStore, trial: str) -> None:
    store.announce_upload(trial, new_manifest().uuid, "attempt-2")


@pytest.mark.parametrize("start", [claimed, uploading])
def test_a_trial_that_starts_after_the_plan_keeps_its_checkpoints(
    local_store: CheckpointStore, start: Callable[[CheckpointStore, str], None]
) -> None:
    """Also before its run has chosen what to resume from. A later plan spares only the newest."""
    old, new = commit_files(local_store, 7), commit_files(local_store, 11)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    start(local_store, new.trial)
    pruned = prune(local_store, plan)
    assert pruned.deleted == ()
    assert [decision.manifest for decision in pruned.spared] == [old, new]
    assert all("since the plan" in decision.why for decision in pruned.spared)
    assert apply(local_store, KEEP_NONE) == [old]


def test_a_run_that_starts_after_the_plan_of_a_trial_that_counted_as_running(
    local_store: CheckpointStore,
) -> None:
    """A killed run had left its claim. The new run's claim has replaced it."""
    manifests = [commit_files(local_store, n) for n in (7, 11, 13)]
    trial = manifests[0].trial
    claimed(local_store, trial)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    assert len(plan.deletions) == 2
    claimed(local_store, trial)
    assert prune(local_store, plan).deleted == ()
    assert local_store.list() == manifests
    assert apply(local_store, KEEP_NONE) == manifests[:2]


def test_a_run_that_claims_what_a_killed_run_uploaded(local_store: CheckpointStore) -> None:
    """In the plan, only an intent showed that the trial runs."""
    manifests = [commit_files(local_store, n) for n in (7, 11)]
    uploading(local_store, manifests[0].trial)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    assert len(plan.deletions) == 1
    claimed(local_store, manifests[0].trial)
    assert prune(local_store, plan).deleted == ()


def test_a_running_trial_is_pruned_while_it_goes_on(local_store: CheckpointStore) -> None:
    """Its claim is the same, whatever it restores and uploads meanwhile."""
    old, new = commit_files(local_store, 7), commit_files(local_store, 11)
    with RunClaim(local_store, new.trial) as claim:
        plan = plan_pruning(local_store, KEEP_NONE, "gpt", running=(new.trial,))
        claim.renew(new.name)
        uploading(local_store, new.trial)
        assert prune(local_store, plan).deleted == (old,)


def test_a_machine_with_a_wrong_clock_deletes_nothing(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 days ahead, it takes the claims of live trials for forgotten ones."""
    at = (datetime.now(timezone.utc) - timedelta(days=40)).isoformat()
    manifest = commit_files(local_store, created_at=at)
    live = Claim(trial=manifest.trial, by="ann@far", at=at, needs=[], owner="", process="")
    local_store.storage.write(layout.claim_key(manifest.trial), encode_json(live))
    leave_unfinished_upload(local_store, "gpt-2", begun_at=at)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    leftovers = find_leftovers(local_store)
    assert [each.keep for each in plan.decisions] == [each.keep for each in leftovers] == [False]
    before = stored_keys(local_store)
    shift_clock(monkeypatch, local_store.storage, timedelta(days=-40))
    with pytest.raises(StorageError, match="set the wrong one"):
        prune(local_store, plan)
    with pytest.raises(StorageError, match="set the wrong one"):
        sweep_leftovers(local_store, leftovers)
    assert stored_keys(local_store) == before


def test_a_slow_prune_deletes_nothing_that_is_needed_meanwhile(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was suspended: its marker is stale, so a pin or a run may ignore it."""
    manifest = commit_files(local_store)
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    look, seconds = pruning._why_needed_now, deletion_markers._seconds
    later = datetime.now(timezone.utc) + timedelta(hours=2)

    def look_slowly(*args: Any) -> str | None:
        seen = look(*args)
        monkeypatch.setattr(deletion_markers, "_seconds", lambda: seconds() + 7200)
        monkeypatch.setattr(Storage, "now", lambda self: later)
        pin(local_store, manifest.uuid, "figure 3")
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "_why_needed_now", look_slowly)
        pruned = prune(local_store, plan)
    ((spared, _, why),) = [(d.manifest, d.keep, d.why) for d in pruned.spared]
    assert (pruned.deleted, spared) == ((), manifest)
    assert "longer than 30 minutes" in why
    assert_clean(local_store)
    unpin(local_store, manifest.uuid)
    assert apply(local_store, KEEP_NONE) == [manifest]


def test_an_uploading_trial_runs(local_store: CheckpointStore) -> None:
    """Also without a claim, as long as its intent is not too old."""
    newest, uuid_to_come = commit_files(local_store, 7), new_manifest().uuid
    local_store.announce_upload(newest.trial, uuid_to_come, "attempt-2")
    assert plan_pruning(local_store, KEEP_NONE, "gpt").deletions == []
    old = Intent(trial=newest.trial, uuid=uuid_to_come, writer="", created_at=LONG_AGO)
    local_store.storage.write(old.key, encode_json(old))
    assert apply(local_store, KEEP_NONE) == [newest]


@pytest.mark.parametrize("is_done", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_next_prune_finishes_a_failed_one(is_done: bool) -> None:
    """At whichever request it failed, listed checkpoints are intact."""
    for nth in itertools.count(1):
        store = memory()
        manifests = [commit_files(store, n) for n in (7, 11, 13)]
        failing = FailingStore(store, nth, is_done)
        try:
            prune(failing, plan_pruning(store, LATEST, "gpt"))
        except StorageError:
            for listed in store.list():
                assert store.find_damage(listed.uuid, listed.files) == []
            apply(store)
        assert store.list() == manifests[2:]
        assert_clean(store)
        if not failing.has_failed:
            break
    assert nth > 12


@pytest.mark.parametrize("step", [8, pytest.param(3, marks=pytest.mark.long)])
def test_two_concurrent_prunes(step: int) -> None:
    """In any order of requests both succeed, and what the rules keep is left."""
    for begun, others, more in itertools.product(range(0, 16, step), range(0, 21, step), (1, 5)):
        store = memory()
        manifests = [commit_files(store, n) for n in (7, 11, 13)]
        act = partial(prune, plan=plan_pruning(store, LATEST, "gpt"))
        order = [False] * begun + [True] * others + [False] * more + [True] * 40
        for outcome in interleave(store.url, act, act, order):
            assert not isinstance(outcome, Exception), outcome
        assert store.list() == manifests[2:]
        assert_clean(store)


def test_an_intent_that_comes_back_after_the_commit_keeps_nothing(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    """A late duplicate of its write, as a network may deliver: the upload has ended."""
    first = commit_files(local_store, 7)
    second = upload(local_store, tmp_path / "second", batches=11, trial=first.trial)
    intent = layout.intent_key(first.trial, second.uuid)
    local_store.announce_upload(first.trial, second.uuid, second.writer, base=first.uuid)
    duplicate = local_store.storage.read(intent)
    assert duplicate is not None
    assert apply(local_store, KEEP_NONE) == []
    local_store.commit(second, base=first.uuid)
    local_store.storage.write(intent, duplicate)
    assert sorted(each.uuid for each in apply(local_store, KEEP_NONE)) == sorted(
        [first.uuid, second.uuid]
    )
    (leftover,) = find_leftovers(local_store)
    assert (leftover.uuid, leftover.files) == (second.uuid, 0)
