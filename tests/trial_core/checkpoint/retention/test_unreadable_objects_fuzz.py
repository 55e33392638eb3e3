"""Whatever lies in a storage, runs, prunes and sweeps end well, and delete nothing that stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import strategies as st

from tests.support.manifests import LONG_AGO, commit_files, new_manifest
from tests.support.strategies import changed, fuzz, json_bytes, stored
from tests.trial_core.checkpoint.retention.test_unreadable_objects import KEEP_NONE, TRIAL
from tests.trial_core.models.helpers import memory_store
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import AttemptRecord
from trial_core.checkpoint.intents import Intent
from trial_core.checkpoint.json_objects import decode_json
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention import claims
from trial_core.checkpoint.retention.claims import Claim
from trial_core.checkpoint.retention.deletion_markers import Deletion
from trial_core.checkpoint.retention.leftovers import find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.protections import Protection, pin, protections, unpin
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention.trial_owner import describe_last_run, own_trial
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialflowError
from trial_core.processes.machine.process_identity import is_alive

KEEP_ALL = RetentionPolicy(save_trial_best=0, save_trial_latest=100)
KEPT, DEAD, OTHER = "kept", "dead", "another"
FILES = {"shard": b"x"}
COMMITTED = new_manifest(7, uuid=KEPT, metrics={"validation": {"loss": 0.5}})
GONE = new_manifest(3, uuid=DEAD)
BY = {"by": "a@b", "at": utc_now()}
RECORDS = [
    Claim(trial=TRIAL, needs=[KEPT], owner="r", process="1@1", **BY),
    Intent(trial=TRIAL, uuid=DEAD, writer="one", created_at=LONG_AGO, number=1, batches=3),
    AttemptRecord(trial=TRIAL, number=7, attempt="one", **BY),
    Protection(uuid=KEPT, **BY),
    Protection(uuid=KEPT, kind="hold", model="gpt", version=1, move=1, unique="x", **BY),
    Deletion(manifest=GONE.to_json().decode(), **BY),
    Deletion(manifest=COMMITTED.to_json().decode(), by="a@b", at=LONG_AGO),
    GONE,
]
PLAIN = [msgspec.json.decode(msgspec.json.encode(record)) for record in RECORDS]
TRIALS, UUIDS = [TRIAL, "x"], [KEPT, DEAD, OTHER]
KEYS = [
    *(layout.claim_key(trial) for trial in TRIALS),
    *(layout.intent_key(trial, uuid) for trial in TRIALS for uuid in UUIDS),
    *(layout.attempt_key(TRIAL, number) for number in (1, 7, 10**18 - 2, 10**18)),
    *(layout.ProtectionName(uuid).key for uuid in UUIDS),
    *(layout.ProtectionName(uuid, "hold", "gpt", 1, "x").key for uuid in UUIDS),
    *(layout.deletion_key(uuid, "x") for uuid in UUIDS),
    *(layout.manifest_key(trial, 3, DEAD) for trial in TRIALS),
    f"{layout.PINS}/a_b/gpt/000001-x.json",
    f"{layout.MANIFESTS}/{TRIAL}/notes.txt",
    f"{layout.CLAIMS}/a b.json",
    f"{layout.DELETIONS}/a/b/c.json",
]  # fmt: skip
objects = st.dictionaries(
    st.sampled_from(KEYS), st.sampled_from(PLAIN).flatmap(stored), min_size=1, max_size=3
)


def prepared(found: dict[str, bytes]) -> Iterator[CheckpointStore]:
    """A store with two checkpoints, files of an upload, and these objects."""
    # A run would wait for the end of a deletion that a marker announces.
    with memory_store() as store, mock.patch.object(claims, "DELETION_WAIT_SECONDS", 0):
        commit_files(store, 7, files=FILES, uuid=KEPT)
        commit_files(store, 9, files=FILES, uuid=OTHER, trial="x")
        store.storage.write(layout.file_key(DEAD, "shard"), b"lost")
        for key, data in found.items():
            store.storage.write(key, data)
        yield store


def run(store: CheckpointStore, source: str | None) -> None:
    """Own the trial, sweep, and save a checkpoint, as a run does."""
    with own_trial(store, TRIAL, "one", take_over=True, source=source) as (claim, fence):
        store.sweep(TRIAL, fence)
        for manifest in store.resume_candidates(TRIAL):
            claim.renew(manifest.name)
        store.announce_upload(TRIAL, "saved", "one", fence)
        store.commit(new_manifest(1, uuid="saved"), fence)


def everything(policy: RetentionPolicy) -> list[Callable[[CheckpointStore], object]]:
    """What commands and runs do with a storage. Each may end with an error of trialflow."""
    return [
        lambda store: prune(store, plan_pruning(store, policy, "gpt")),
        lambda store: prune(store, plan_pruning(store, policy, "gpt", trial=TRIAL)),
        lambda store: sweep_leftovers(store, find_leftovers(store)),
        lambda store: describe_last_run(store, TRIAL),
        lambda store: (store.list(), store.newest(TRIAL), store.newest_trial("gpt")),
        lambda store: run(store, OTHER),
        lambda store: pin(store, OTHER),
        lambda store: (protections(store), unpin(store, OTHER)),
        lambda store: sweep_leftovers(store, find_leftovers(store)),
        lambda store: prune(store, plan_pruning(store, policy, "gpt")),
    ]


def do_everything(store: CheckpointStore, policy: RetentionPolicy) -> None:
    for step in everything(policy):
        with contextlib.suppress(TrialflowError):
            step(store)


@fuzz(40, found=objects)
def test_no_object_makes_trialflow_delete_what_the_rules_keep(found: dict[str, bytes]) -> None:
    """Each committed checkpoint is listed as before, and intact."""
    for store in prepared(found):
        do_everything(store, KEEP_ALL)
        for uuid in (KEPT, OTHER):
            store.verify(uuid)


@fuzz(
    25, found=objects, protects=st.sampled_from(["pin", "hold", "claim", "intent"]), data=st.data()
)
def test_an_unreadable_record_protects(
    found: dict[str, bytes], protects: str, data: st.DataObject
) -> None:
    """Of a checkpoint, or of a trial whose newest checkpoint it is."""
    kinds: dict[str, tuple[str, type[msgspec.Struct], Any]] = {
        "pin": (layout.ProtectionName(KEPT).key, Protection, PLAIN[3]),
        "hold": (layout.ProtectionName(KEPT, "hold", "gpt", 1, "x").key, Protection, PLAIN[4]),
        "claim": (layout.claim_key(TRIAL), Claim, PLAIN[0]),
        "intent": (layout.intent_key(TRIAL, "u"), Intent, PLAIN[1]),
    }
    key, kind, record = kinds[protects]
    written = data.draw(stored(record))
    is_readable = decode_json(written, kind) is not None
    for store in prepared({**found, key: written}):
        prune(store, plan_pruning(store, KEEP_NONE, "gpt"))
        sweep_leftovers(store, find_leftovers(store))
        prune(store, plan_pruning(store, KEEP_NONE, "gpt"))
        if protects in ("pin", "hold") or not is_readable:
            store.verify(KEPT)


def test_an_intent_of_another_trial_sweeps_no_committed_checkpoint() -> None:
    """A copied intent names the checkpoint of the trial that it was copied from."""
    for store in prepared({layout.intent_key("x", KEPT): json_bytes(PLAIN[1])}):
        store.sweep("x")
        store.verify(KEPT)
        assert store.storage.read(layout.intent_key("x", KEPT)) is None


@pytest.mark.parametrize("fields", [{"trial": "x"}, {"progress": {"batches_trained": 8}}], ids=str)
def test_a_marker_with_another_manifest_deletes_no_committed_checkpoint(
    fields: dict[str, Any],
) -> None:
    """Its uuid is the checkpoint's; the manifest that it names is not there."""
    other = msgspec.convert({**msgspec.to_builtins(COMMITTED), **fields}, Manifest)
    marker = Deletion(manifest=other.to_json().decode(), by="a@b", at=LONG_AGO)
    data = msgspec.json.encode(marker)
    for store in prepared({layout.deletion_key(KEPT, "x"): data}):
        prune(store, plan_pruning(store, KEEP_ALL, "gpt"))
        store.verify(KEPT)


@fuzz(20, process=changed("7@7", most=1).filter(lambda each: isinstance(each, str)))
def test_any_process_is_alive_or_not(process: str) -> None:
    """Also one whose number no machine has."""
    assert is_alive(process) in (True, False)


def test_a_process_with_a_very_long_number_counts_as_alive() -> None:
    """It tells nothing."""
    assert is_alive("9" * 5000 + "@1")
