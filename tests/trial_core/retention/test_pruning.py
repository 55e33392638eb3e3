"""Deleting what the rules do not keep: nothing else, and nothing halfway, whatever goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from functools import partial
from typing import Any

import pytest

from tests.support.interleaving import interleave
from tests.support.manifests import FILES, Breaking, entry, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.intents import Intent
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import DELETIONS, claim_key, deletion_key
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.retention.claims import claim_run, claims
from trial_core.retention.deletions import Deletion, finish_deletions
from trial_core.retention.pins import pin
from trial_core.retention.policy import RetentionPolicy
from trial_core.retention.pruning import experiments, plan_pruning, prune
from trial_core.transfer.files import find_damage

LATEST = RetentionPolicy(save_trial_best=0, save_trial_latest=1)
NOTHING = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
LONG_AGO = "2001-05-09T17:04:00.000000Z"


def commit(store: CheckpointStore, batches: int, **fields: Any) -> Manifest:
    """A committed checkpoint of several files."""
    files = [entry(path, data) for path, data in FILES.items()]
    manifest = new_manifest(batches, **{"files": files, **fields})
    for path, data in FILES.items():
        store.storage.write(layout.file_key(manifest.uuid, path), data)
    store.commit(manifest)
    return manifest


def memory() -> CheckpointStore:
    return CheckpointStore(f"memory://{uuid.uuid4()}")


def apply(store: CheckpointStore, policy: RetentionPolicy = LATEST, **asked: Any) -> list[Manifest]:
    """Plan and prune; what was deleted."""
    return [*prune(store, plan_pruning(store, policy, "gpt", **asked)).deleted]


def assert_clean(store: CheckpointStore) -> None:
    """What is listed is whole, nothing else is there, and nothing is said to be deleted."""
    listed = store.list()
    assert [damage for each in listed for damage in find_damage(store, each.uuid, each.files)] == []
    folders = {key.split("/")[1] for key in store.storage.sizes(layout.CHECKPOINTS)}
    assert folders == {manifest.uuid for manifest in listed}
    assert store.storage.sizes(DELETIONS) == {}


def test_what_the_rules_do_not_keep_is_gone(store: CheckpointStore) -> None:
    """Manifest and files, on every kind of storage; the rest is as it was."""
    old, new = commit(store, 7), commit(store, 11)
    others = [commit(store, n, trial="other-1", experiment="other") for n in (3, 5)]
    assert apply(store) == [old]
    assert store.list() == [*others, new]
    assert_clean(store)


def test_a_plan_changes_nothing(local_store: CheckpointStore) -> None:
    """It says what would go, how much that is, and why."""
    old, new = commit(local_store, 7), commit(local_store, 11)
    plan = plan_pruning(local_store, LATEST, "gpt")
    assert [decision.manifest for decision in plan.deletions] == [old]
    assert [decision.manifest for decision in plan.kept] == [new]
    assert plan.freed_bytes == sum(map(len, FILES.values()))
    assert [(row["action"], row["why"]) for row in plan.rows()] == [
        ("delete", "2nd latest, and 1 is kept"),
        ("keep", "latest of its trial"),
    ]
    assert local_store.list() == [old, new]


def test_a_trial_alone(local_store: CheckpointStore) -> None:
    """The others stay, and count for what is best in the experiment."""
    mine = [commit(local_store, n, trial="mine-1", **validated(n, loss=n / 10)) for n in (7, 11)]
    for n in (5, 3):
        commit(local_store, n, trial="other-1", **validated(n, loss=0.1))
    policy = RetentionPolicy(0, 0, save_experiment_best=2, metric="loss")
    assert apply(local_store, policy, trial="mine-1") == mine
    assert len(local_store.list("other-1")) == 2


def validated(batches: int, loss: float) -> dict[str, Any]:
    manifest = new_manifest(batches)
    progress = manifest.progress.after_validation(loss, smaller_is_better=True)
    return {"progress": progress, "metrics": {"validation": {"loss": loss}}}


def test_a_trial_whose_experiment_was_renamed(local_store: CheckpointStore) -> None:
    """Belongs to the last one, and to it whole: what it saved under the old name is not the latest
    of another trial, and nobody who prunes the old experiment has a say."""
    old = commit(local_store, 7, experiment="old name")
    commit(local_store, 11)
    assert experiments(local_store) == ["gpt"]
    assert plan_pruning(local_store, NOTHING, "old name").decisions == ()
    assert apply(local_store) == [old]


def test_a_manifest_that_cannot_be_read_is_left_alone(local_store: CheckpointStore) -> None:
    """Nothing is known of it, so nothing is decided."""
    old = commit(local_store, 7)
    commit(local_store, 11)
    local_store.storage.write(old.name.key, b"{}")
    assert apply(local_store) == []
    assert len(local_store.storage.sizes(layout.files_folder(old.uuid))) == len(FILES)


def test_pins_and_claims_hold(local_store: CheckpointStore) -> None:
    """A pinned checkpoint, the one that another trial's run has started from, and the newest of a
    trial that runs, under rules that keep nothing."""
    pinned, source, _, newest = [commit(local_store, n) for n in (7, 11, 13, 17)]
    pin(local_store, pinned.uuid, "figure 3", by="ann@here")
    with (
        claim_run(local_store, newest.trial),
        claim_run(local_store, "other-1", source=source.uuid[:8]),
    ):
        plan = plan_pruning(local_store, NOTHING, "gpt")
        assert [decision.why.partition(",")[0] for decision in plan.kept] == [
            "pinned by ann@here: figure 3",
            "trial other-1 runs",
            "its trial runs",
        ]
    assert len(plan_pruning(local_store, NOTHING, "gpt").kept) == 1


def test_what_is_needed_since_the_plan_was_made_is_spared(local_store: CheckpointStore) -> None:
    """A pin, or a run that starts from it: it is looked again before each deletion."""
    pinned, source, old = [commit(local_store, n) for n in (7, 11, 13)]
    plan = plan_pruning(local_store, NOTHING, "gpt")
    pin(local_store, pinned.uuid)
    with claim_run(local_store, "other-1") as claim:
        claim.renew(source.uuid)
        pruned = prune(local_store, plan)
    assert pruned.deleted == (old,)
    assert [decision.manifest for decision in pruned.spared] == [pinned, source]
    assert_clean(local_store)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_prune_that_fails_anywhere_is_finished_by_the_next(is_done: bool) -> None:
    """At each of its requests, carried out or not: what is listed then is whole, and the next
    prune leaves nothing behind."""
    for nth in itertools.count(1):
        store = memory()
        manifests = [commit(store, n) for n in (7, 11, 13)]
        plan = plan_pruning(store, LATEST, "gpt")
        broken = CheckpointStore(store.url)
        broken.storage = Breaking(broken.storage, nth, is_done)  # type: ignore[assignment]
        try:
            prune(broken, plan)
        except StorageError:
            for listed in store.list():
                assert find_damage(store, listed.uuid, listed.files) == []
            apply(store)
        else:
            if broken.storage.left > 0:  # type: ignore[attr-defined]  # it came through untouched
                break
        assert store.list() == manifests[2:]
        assert_clean(store)
    assert nth > 12


def test_two_prunes_at_the_same_moment() -> None:
    """In whatever order their requests come, both end well and leave what the rules keep."""
    for begun, others, more in itertools.product(range(0, 16, 3), range(0, 21, 4), (1, 2, 5)):
        store = memory()
        manifests = [commit(store, n) for n in (7, 11, 13)]
        act = partial(prune, plan=plan_pruning(store, LATEST, "gpt"))
        order = [False] * begun + [True] * others + [False] * more + [True] * 40
        first, second = interleave(store.url, act, act, order)
        assert not isinstance(first, Exception), first
        assert not isinstance(second, Exception), second
        assert store.list() == manifests[2:]
        assert_clean(store)


def test_a_deletion_that_was_interrupted_is_finished(local_store: CheckpointStore) -> None:
    """Its manifest is gone, its files are not yet: they go with whatever prune comes next."""
    old = commit(local_store, 7)
    say_that_it_is_deleted(local_store, old, utc_now())
    local_store.storage.delete(old.name.key)
    assert finish_deletions(local_store) == [old]
    assert_clean(local_store)


def test_a_deletion_that_never_began_is_forgotten(local_store: CheckpointStore) -> None:
    """Once whoever meant it must be dead; the checkpoint is decided upon anew."""
    manifest = commit(local_store, 7)
    say_that_it_is_deleted(local_store, manifest, utc_now())
    assert finish_deletions(local_store) == []
    assert len(local_store.storage.sizes(DELETIONS)) == 1
    say_that_it_is_deleted(local_store, manifest, LONG_AGO)
    assert finish_deletions(local_store) == []
    assert local_store.list() == [manifest]
    assert_clean(local_store)


def test_a_deletion_half_written_deletes_nothing(local_store: CheckpointStore) -> None:
    """Whoever wrote it died before the first deletion."""
    manifest = commit(local_store, 7)
    local_store.storage.write(deletion_key(manifest.uuid), b'{"by": "ann')
    assert finish_deletions(local_store) == []
    assert local_store.list() == [manifest]
    assert_clean(local_store)


def say_that_it_is_deleted(store: CheckpointStore, manifest: Manifest, at: str) -> None:
    said = Deletion(by="ann@here", at=at, manifest=manifest.to_json().decode())
    store.storage.write(deletion_key(manifest.uuid), encode_json(said))


def test_a_claim_lasts_as_long_as_the_run(store: CheckpointStore) -> None:
    """On every kind of storage; also when the run fails."""
    with contextlib.suppress(KeyError), claim_run(store, "gpt-1", source="abc") as claim:
        assert [(each.trial, each.needs) for each in claims(store)] == [("gpt-1", ["abc"])]
        claim.renew("def")
        assert [each.needs for each in claims(store)] == [["abc", "def"]]
        raise KeyError
    assert claims(store) == []


def test_a_claim_that_was_left_behind_is_abandoned_one_day(local_store: CheckpointStore) -> None:
    """A killed driver takes nothing back. While the trial goes on saving, its claim counts."""
    with claim_run(local_store, "gpt-1"):
        data = local_store.storage.read(claim_key("gpt-1")) or b""
    (seen,) = [line for line in data.decode().splitlines() if '"at"' in line]
    old = data.decode().replace(seen, f'"at": "{LONG_AGO}",').encode()
    local_store.storage.write(claim_key("gpt-1"), data)
    assert len(claims(local_store)) == 1
    local_store.storage.write(claim_key("gpt-1"), old)
    assert claims(local_store) == []
    assert len(claims(local_store, last_saved={"gpt-1": utc_now()})) == 1


def test_a_trial_that_uploads_runs(local_store: CheckpointStore) -> None:
    """Also where nothing claims it; until the upload must be taken for given up."""
    newest = commit(local_store, 7)
    uuid_to_come = new_manifest().uuid
    local_store.announce_upload(newest.trial, uuid_to_come, "attempt-2")
    assert plan_pruning(local_store, NOTHING, "gpt").deletions == []
    given_up = Intent(trial=newest.trial, uuid=uuid_to_come, attempt="", created_at=LONG_AGO)
    local_store.storage.write(given_up.key, encode_json(given_up))
    assert apply(local_store, NOTHING) == [newest]


def test_a_run_leaves_its_successors_claim_alone(local_store: CheckpointStore) -> None:
    """One that was taken for dead ends at last; another needs a checkpoint for the same trial."""
    first, second = (claim_run(local_store, "gpt-1", source=name) for name in ("abc", "def"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [claim.needs for claim in claims(local_store)] == [["def"]]
    second.__exit__(None, None, None)
    assert claims(local_store) == []


def test_a_claim_that_cannot_be_read_is_one(local_store: CheckpointStore) -> None:
    """Some run is there, or was a moment ago."""
    newest = commit(local_store, 7)
    local_store.storage.write(claim_key(newest.trial), b"{")
    assert apply(local_store, NOTHING) == []


def test_a_claim_that_cannot_be_written_is_a_warning(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on."""
    local_store.storage = Breaking(local_store.storage, 1, False)  # type: ignore[assignment]
    with claim_run(local_store, "gpt-1"):
        pass
    assert "trial gpt-1 has no claim, so a prune may delete checkpoints that it needs: the storage" in caplog.text
