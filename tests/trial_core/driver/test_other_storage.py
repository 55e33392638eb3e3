"""A run in a storage that is not the one it should be, as a folder that is not mounted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.manifests import put_files
from tests.support.slots import toy_config
from tests.support.stores import mount, unmount
from tests.trial_core.driver.test_drive import FullMachine
from trial_core.checkpoint.fencing import newest_attempts
from trial_core.checkpoint.retention.known_storages import note_storage, refuse_other_storage
from trial_core.checkpoint.storage_mark import marked
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Run
from trial_core.driver.script_driver_main import first_point
from trial_core.errors import (
    CheckpointError,
    CheckpointNotFound,
    LaunchError,
    StorageError,
    TrialflowError,
)

WITHOUT_RANKS = FullMachine()
logger = logging.getLogger(__name__)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    return toy_config(tmp_path, checkpoint_storage=f"file://{tmp_path}/stored", max_restarts=0)


@pytest.fixture
def stored(config: ExperimentConfig, tmp_path: Path) -> CheckpointStore:
    """The run's storage; `tmp_path / "stored"`."""
    return CheckpointStore(config.checkpoint_storage.url)


def test_ranks_are_not_launched_again_from_the_beginning(
    config: ExperimentConfig, stored: CheckpointStore, tmp_path: Path
) -> None:
    """If the storage is gone when they have failed, the run ends; a start with it continues."""
    fence = stored.take_over(TRIAL, "one")
    run = Run(config, TRIAL, tmp_path, stored, fence=fence)
    manifest = put_files(stored, trial=TRIAL)
    stored.commit(manifest, fence)
    unmount(tmp_path / "stored")
    with pytest.raises(StorageError, match=f"trial {TRIAL} is not continued: .* Mount it"):
        run.resume_points()
    mount(tmp_path / "stored")
    assert [point.uuid for point in run.resume_points()] == [manifest.uuid]


def test_a_run_is_refused_before_it_takes_a_trial(
    config: ExperimentConfig, stored: CheckpointStore
) -> None:
    """A trial that the storage does not know, one whose id is taken, and a storage with another
    mark than the caller says."""
    mark = marked(stored.storage)
    with pytest.raises(CheckpointNotFound, match="neither an attempt at it nor a checkpoint"):
        drive(config, is_new=False, joining=WITHOUT_RANKS)
    with pytest.raises(StorageError, match=f"its mark is {mark}, expected theirs"):
        drive(config, storage="theirs", joining=WITHOUT_RANKS)
    assert list(newest_attempts(stored.storage, TRIAL)) == []
    begun: list[str] = []
    with pytest.raises(LaunchError):
        drive(config, is_new=True, storage=mark, begun=begun.append, joining=WITHOUT_RANKS)
    assert begun == [mark]
    stored.take_over("toy-0000cafe", "another")
    with pytest.raises(TrialflowError, match="another trial with this id"):
        drive(config, "toy-0000cafe", is_new=True, joining=WITHOUT_RANKS)
    assert [number for number, _ in newest_attempts(stored.storage, TRIAL)] == [1]


def test_latest_of_a_storage_that_is_gone_is_no_new_trial(
    config: ExperimentConfig, stored: CheckpointStore, tmp_path: Path
) -> None:
    """This machine remembers the storages of its runs. An empty one that is new is no mistake."""
    assert first_point(stored, config, "latest").checkpoint is None
    with pytest.raises(LaunchError):
        drive(config, is_new=True, joining=WITHOUT_RANKS)
    assert first_point(stored, config, "latest").checkpoint is None  # it has saved nothing
    unmount(tmp_path / "stored")
    with pytest.raises(StorageError, match=r"nothing to resume in .*stored, and it is not the st"):
        first_point(stored, config, "latest")
    assert first_point(stored, config, None).checkpoint is None


def test_a_storage_that_was_replaced_is_noted(
    config: ExperimentConfig, stored: CheckpointStore, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A new trial there is begun with a warning. The first storage stays known until its note is
    deleted, and is the right one when it is mounted again."""
    note_storage(stored, marked(stored.storage), logger)
    assert caplog.records == []
    unmount(tmp_path / "stored")
    for _ in range(2):
        note_storage(stored, marked(stored.storage), logger)
    (note,) = (tmp_path / "home" / "storages").iterdir()
    with pytest.raises(StorageError, match=f"if the old storage is gone for good, delete {note}"):
        refuse_other_storage(stored)
    (warning,) = caplog.records
    assert f"if the old one is gone for good, delete {note}" in warning.getMessage()
    replacement = note.read_text()
    mount(tmp_path / "stored")
    refuse_other_storage(stored)
    note_storage(stored, marked(stored.storage), logger)
    assert note.read_text() == replacement
    unmount(tmp_path / "stored")
    note.unlink()
    refuse_other_storage(stored)


def test_storages_of_one_url_are_told_apart(
    config: ExperimentConfig, stored: CheckpointStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A bucket by its endpoint, a folder by its machine: the home folder may be shared."""
    for endpoint in ("http://one:9000", "http://two:9000"):
        bucket = CheckpointStore("s3://bucket/runs", {"endpoint_url": endpoint})
        note_storage(bucket, endpoint, logger)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        note_storage(CheckpointStore("s3://bucket/runs"), endpoint, logger)
    for machine in ("one", "two"):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        note_storage(stored, machine, logger)
    assert caplog.records == []
    assert len(list((tmp_path / "home" / "storages").iterdir())) == 6


def test_a_storage_in_memory_is_no_storage_to_come_back_to(config: ExperimentConfig) -> None:
    """A flow run's retry in another process cannot find it, and begins again."""
    place = type(config.checkpoint_storage).model_validate("memory://not-labelled")
    begun: list[str] = []
    with pytest.raises(LaunchError):
        drive(
            config.model_copy(update={"checkpoint_storage": place}),
            is_new=True, begun=begun.append, joining=WITHOUT_RANKS,
        )  # fmt: skip
    assert begun == []


def test_storages_in_memory_are_not_noted(
    config: ExperimentConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """They end with their process."""
    store = CheckpointStore("memory://other-storage")
    note_storage(store, "one", logger)
    note_storage(store, "another", logger)
    assert caplog.records == []


def test_damage_to_what_is_noted_refuses_nothing(
    config: ExperimentConfig, stored: CheckpointStore, tmp_path: Path
) -> None:
    """Without a readable note, this machine does not know the storage."""
    note_storage(stored, "theirs", logger)
    with pytest.raises(CheckpointError):
        refuse_other_storage(stored)
    (note,) = (tmp_path / "home" / "storages").iterdir()
    note.write_bytes(b"")
    refuse_other_storage(stored)
    note.unlink()
    refuse_other_storage(stored)
