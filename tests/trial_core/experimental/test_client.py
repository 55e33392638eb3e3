"""`trial_core.experimental.client` reads a storage by Determined's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.manifests import FILES, commit_files, put_files
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, ModelNotFound
from trial_core.experimental import Determined, client
from trial_core.experimental.client import TrialMetrics
from trial_core.models.registry import Registry
from trial_core.observe.report.history import ReportHistory
from trial_core.schedule.sequencer import Progress

TRIAL, NUMBER = "gpt-0123abcd", 0x0123ABCD


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """A storage with two checkpoints of a trial, the first one its best, that is chosen."""
    stored = CheckpointStore(str(tmp_path / "stored"))
    searcher = {"searcher": {"metric": "loss"}}
    for batches, loss in ((3, 0.25), (7, 0.5)):
        progress = Progress(batches_trained=batches, validated_at=batches)
        metrics = {"validation": {"loss": loss}, "training": {"loss": 1.0}}
        commit_files(stored, batches, progress=progress, metrics=metrics, config=searcher)
    client.login(str(tmp_path / "stored"))
    yield stored
    client.login()


def test_a_checkpoint_is_found_and_downloaded(store: CheckpointStore, tmp_path: Path) -> None:
    """Its files are verified, its metrics those of this state."""
    uuid = store.list()[0].uuid
    found = client.get_checkpoint(uuid[:8])
    assert (found.uuid, found.metadata) == (uuid, {})
    folder = found.download(str(tmp_path / "model"))
    assert all((Path(folder) / path).read_bytes() == data for path, data in FILES.items())
    assert found.get_metrics("validation") == [
        TrialMetrics(NUMBER, 3, {"loss": 0.25}, "validation")
    ]
    assert len(found.get_metrics()) == 2
    found.delete()
    with pytest.raises(CheckpointNotFound):
        client.get_checkpoint(uuid)


def test_metadata_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
    """Of the same length, too."""
    stored = CheckpointStore(str(tmp_path / "stored"))
    manifest = put_files(stored, 3, {"metadata.json": b'{"steps_completed": 3}'})
    stored.commit(manifest)
    found = client.StoredCheckpoint(stored, manifest)
    assert found.metadata == {"steps_completed": 3}
    key = manifest.all_files[0].key(manifest.uuid)
    stored.storage.write(key, b'{"steps_completed": 9}')
    with pytest.raises(CheckpointDamaged, match=r"metadata.json.* has digest sha256:"):
        assert found.metadata
    stored.storage.remove(key)
    with pytest.raises(CheckpointDamaged, match=r"metadata.json.* is missing"):
        assert found.metadata
    found.delete()
    with pytest.raises(CheckpointNotFound, match="has been deleted meanwhile"):
        assert found.metadata


@pytest.mark.parametrize(
    "text", [b"[1]", b"{", b"[" * 100_000, b"\xff"], ids=["list", "cut", "deep", "bytes"]
)
def test_metadata_that_are_no_mapping_are_refused(tmp_path: Path, text: bytes) -> None:
    """By the name of the file."""
    stored = CheckpointStore(str(tmp_path / "stored"))
    manifest = put_files(stored, 3, {"metadata.json": text})
    with pytest.raises(CheckpointDamaged, match=r"metadata\.json"):
        assert client.StoredCheckpoint(stored, manifest).metadata


@pytest.mark.parametrize("reference", [TRIAL, NUMBER])
def test_a_trial_has_checkpoints_and_metrics(store: CheckpointStore, reference: int | str) -> None:
    """By its id, or by the number that scripts know it by."""
    trial = client.get_trial(reference)
    assert (trial.id, trial.name) == (NUMBER, TRIAL)
    assert [each.manifest.progress.batches_trained for each in trial.list_checkpoints()] == [3, 7]
    best = trial.top_checkpoint(sort_by="loss")
    assert best is not None
    assert best.manifest.progress.batches_trained == 3
    assert list(trial.iter_metrics("training")) == []
    history = ReportHistory()
    history.add_point("training", 5, {"loss": 0.75})
    store.storage.write(layout.run_file_key(TRIAL, "report.json"), history.to_json())
    assert list(trial.iter_metrics("training")) == [
        TrialMetrics(NUMBER, 5, {"loss": 0.75}, "training")
    ]


def test_a_trial_that_is_not_there_is_an_error(store: CheckpointStore) -> None:
    """It names those that are."""
    with pytest.raises(CheckpointNotFound, match=rf"number 5 in .*: {TRIAL} \({NUMBER}\)"):
        client.get_trial(5)


def test_a_model_has_versions(store: CheckpointStore) -> None:
    """Newest first. -1 is the newest."""
    for manifest in store.list():
        Registry(store).register("gpt", manifest, metric="loss", smaller_is_better=True, value=1.0)
    model = client.get_model("gpt")
    assert [each.name for each in client.list_models()] == ["gpt"]
    assert [each.model_version for each in model.list_versions()] == [2, 1]
    newest, first = model.get_version(), model.get_version(1)
    assert newest is not None
    assert first is not None
    assert (newest.model_version, first.checkpoint.manifest.progress.batches_trained) == (2, 3)
    assert model.get_version(3) is None
    with pytest.raises(ModelNotFound):
        client.get_model("bert")


def test_a_client_is_of_one_storage(store: CheckpointStore, tmp_path: Path) -> None:
    """And says what to use for what needs a server."""
    assert Determined(str(tmp_path / "another")).store.list() == []
    with pytest.raises(AttributeError, match=r"no attribute 'load'; use trial_core\.pytorch"):
        client.get_checkpoint(store.list()[0].uuid).load()


def test_a_damaged_report_is_named(store: CheckpointStore) -> None:
    """Whoever wrote it, and whatever is wrong with it."""
    store.storage.write(layout.run_file_key(TRIAL, "report.json"), b'{"a":' + b"[" * 200_000)
    with pytest.raises(CheckpointDamaged, match=r"report.json is not a readable report"):
        list(client.get_trial(TRIAL).iter_metrics("training"))
