"""The judge of `lifetimes`: what it refuses, and what it lets pass that is no defect.

Each is a history that a simulation has found, with nothing else in it.
"""

from __future__ import annotations

import random
import uuid as uuids
from collections.abc import Iterator

import pytest

from tests.linearizability import lifetimes
from tests.linearizability.lifetimes import Judge
from tests.linearizability.simulation import Simulation
from tests.support.manifests import commit_files, put_files
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.retention.deletion_markers import mark_deletion
from trial_core.checkpoint.retention.leftovers import find_leftovers
from trial_core.checkpoint.retention.protections import Protection
from trial_core.checkpoint.store import CheckpointStore


@pytest.fixture
def judge() -> Iterator[Judge]:
    """The judge of a simulation in which nothing happens but what a test does."""
    simulation = Simulation(0, may_be_late=lambda key: False)
    with simulation.world():
        yield Judge(simulation)


@pytest.fixture
def store(judge: Judge) -> CheckpointStore:
    """A client that the judge sees."""
    return judge.store()


def _committed(store: CheckpointStore) -> Manifest:
    return commit_files(store, 7, files={"model": b"weights"}, trial="gpt-1")


def _lose_files(judge: Judge, manifest: Manifest) -> None:
    key = layout.file_key(manifest.uuid, "model")
    judge.spoiled.add(key)
    del judge.simulation.objects[key]


def _announce(store: CheckpointStore, base: Manifest, takeovers: int) -> None:
    for _ in range(takeovers):
        fence = store.take_over("gpt-1", "flow-run-1")
    store.announce_upload("gpt-1", str(uuids.uuid4()), "launch-1", fence, base.uuid)


def test_a_committed_checkpoint_whose_file_is_gone(judge: Judge, store: CheckpointStore) -> None:
    """The judge refuses it unless the storage has lost the file."""
    manifest = _committed(store)
    _lose_files(judge, manifest)
    judge.spoiled.clear()
    with pytest.raises(Exception, match="is damaged"):
        judge.check_end()


def test_a_needed_file_is_deleted(store: CheckpointStore) -> None:
    """The judge refuses it at once."""
    manifest = _committed(store)
    with pytest.raises(AssertionError, match="is deleted, to which"):
        store.storage.remove(layout.file_key(manifest.uuid, "model"))


def test_a_commit_is_repeated_while_a_person_deletes_its_checkpoint(
    judge: Judge, store: CheckpointStore
) -> None:
    """It leaves a manifest without files, which is not refused."""
    manifest = _committed(store)
    mark_deletion(store, manifest)
    store.storage.remove(manifest.name.key)
    store.commit(manifest)
    store.storage.remove(layout.file_key(manifest.uuid, "model"))
    judge.check_end()
    assert judge.simulation.counts["without files"] == 1


@pytest.mark.parametrize("takeovers", [3, 13])
def test_a_deletion_waits_for_an_upload_that_no_sweep_finds_yet(
    judge: Judge, store: CheckpointStore, takeovers: int
) -> None:
    """A person has deleted the records of a trial's attempts, so that numbers begin again.

    Until they reach that of a killed attempt, its intent keeps its base from being deleted.
    """
    base = _committed(store)
    _announce(store, base, takeovers)
    judge.forget_attempts()
    _lose_files(judge, base)
    judge.check_end()
    assert judge.simulation.counts["not deleted yet"] == takeovers - 1


def test_a_deletion_waits_for_an_upload_that_a_sweep_should_have_found(
    judge: Judge, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge refuses it, although the next sweep finds the upload."""
    base = _committed(store)
    _announce(store, base, 3)
    _lose_files(judge, base)
    skipped = iter([True])
    monkeypatch.setattr(
        lifetimes, "find_leftovers",
        lambda store: [] if next(skipped, False) else find_leftovers(store),
    )  # fmt: skip
    with pytest.raises(Exception, match="is not deleted: checkpoint"):
        judge.check_end()


def test_a_run_saves_whose_record_a_person_has_deleted(
    judge: Judge, store: CheckpointStore
) -> None:
    """A later run may have its number, and sweep its files: then they need not stay."""
    actor = lifetimes.Actor(judge, random.Random(0), "0")
    actor.begin("gpt-1")
    judge.forget_attempts()
    store.take_over("gpt-1", "flow-run-1")
    actor.save()
    (manifest,) = store.list("gpt-1")
    store.storage.clear(layout.files_folder(manifest.uuid), frozenset())
    judge.check_end()


def test_a_commit_after_a_sweep(judge: Judge, store: CheckpointStore) -> None:
    """The judge refuses it, unless a person has deleted its intent, which the sweep needs."""
    manifest = put_files(store, 7, files={"model": b"weights"}, trial="gpt-1")
    fence = store.take_over("gpt-1", "flow-run-1")
    store.announce_upload("gpt-1", manifest.uuid, "launch-1", fence)
    store.sweep("gpt-1", store.take_over("gpt-1", "flow-run-2"))
    store.storage.write(manifest.name.key, manifest.to_json())
    with pytest.raises(AssertionError, match="was committed after the sweep"):
        judge.has_committed(manifest, fence)
    judge.altered[layout.intent_key("gpt-1", manifest.uuid)] = None
    judge.mend()
    judge.has_committed(manifest, fence)


def test_a_pin_comes_when_its_checkpoint_is_gone(judge: Judge, store: CheckpointStore) -> None:
    """A person deletes it, so that the orphaned files can be swept."""
    uuid = str(uuids.uuid4())
    store.storage.write(layout.file_key(uuid, "model"), b"lost")
    pin = Protection(uuid=uuid, by="u@h", at=utc_now())
    store.storage.write(pin.key, encode_json(pin))
    judge.check_end()
    assert not [key for key in judge.simulation.objects if uuid in key]
