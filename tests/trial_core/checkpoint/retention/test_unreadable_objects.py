"""A foreign or damaged object is named and skipped; it stops no prune and no run."""

from __future__ import annotations

import pytest

from tests.support.manifests import commit_files, new_manifest, put_files, stored_keys
from trial_core.checkpoint import layout
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.leftovers import find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.protections import pin
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.storage import base
from trial_core.checkpoint.store import CheckpointStore

TRIAL = new_manifest().trial
KEEP_NONE = RetentionPolicy(save_trial_best=0, save_trial_latest=0)
DEEP = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MAX_BYTES = 300_000
AT = "2031-13-41T25:61:61Z"
RECORDS = [
    b"\xff",
    DEEP,
    f'{{"trial": "t", "uuid": "u", "attempt": "", "by": "", "at": "{AT}", "needs": [], '
    f'"number": 1, "manifest": "", "created_at": "{AT}"}}'.encode(),
    b" " * (MAX_BYTES + 1),
]


def prune_and_run(store: CheckpointStore) -> None:
    """Prune, sweep, pin, and save a checkpoint as a run of the trial does."""
    prune(store, plan_pruning(store, KEEP_NONE, "gpt"))
    sweep_leftovers(store, find_leftovers(store))
    fence = store.take_over(TRIAL, "one")
    store.sweep(TRIAL, fence)
    saved = put_files(store, 13)
    store.announce_upload(TRIAL, saved.uuid, "one", fence)
    store.commit(saved, fence)
    assert store.resume_candidates(TRIAL)[0] == saved
    pin(store, saved.uuid)
    with RunClaim(store, TRIAL) as claim:
        claim.renew(saved.name)


@pytest.mark.parametrize("data", RECORDS, ids=["no text", "deep", "impossible time", "too large"])
@pytest.mark.parametrize("family", ["claim", "pin", "hold", "intent", "attempt", "deletion"])
def test_a_damaged_record_stops_nothing(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, family: str, data: bytes
) -> None:
    """And what it may protect is kept: the checkpoint, or the newest of the trial."""
    monkeypatch.setattr(base, "MAX_OBJECT_BYTES", MAX_BYTES)
    kept = commit_files(local_store, 7)
    key = {
        "claim": layout.claim_key(TRIAL),
        "pin": layout.ProtectionName(kept.uuid).key,
        "hold": layout.ProtectionName(kept.uuid, "hold", "gpt", 1, "u").key,
        "intent": layout.intent_key(TRIAL, "u"),
        "attempt": layout.attempt_key(TRIAL, 1),
        "deletion": layout.deletion_key("another", "u"),
    }[family]
    local_store.storage.write(key, data)
    prune_and_run(local_store)
    if family in ("claim", "pin", "hold", "intent"):
        assert kept in local_store.list()


@pytest.mark.parametrize(
    "key",
    [
        f"{layout.MANIFESTS}/{TRIAL}/notes.txt",
        f"{layout.CLAIMS}/a b.json",
        f"{layout.PINS}/notes.txt",
        f"{layout.UPLOADS}/{TRIAL}/notes.txt",
        f"{layout.DELETIONS}/a/b/c.json",
    ],
)
def test_a_foreign_object_is_named(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """It is neither used nor deleted."""
    commit_files(local_store, 7)
    local_store.storage.write(key, b"hello")
    prune_and_run(local_store)
    assert f"{key} is ignored: trialflow never uses such a name here" in caplog.text
    assert local_store.storage.read(key) == b"hello"


def test_a_damaged_claim_is_named(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says where it is, and that what it may protect is kept."""
    commit_files(local_store, 7)
    local_store.storage.write(layout.claim_key(TRIAL), b"{")
    plan = plan_pruning(local_store, KEEP_NONE, "gpt")
    assert plan.deletions == []
    expected = f"{local_store.url}/claims/{TRIAL}.json is not a readable Claim, and what it may"
    assert expected in caplog.text
    assert len(stored_keys(local_store)) > 1
