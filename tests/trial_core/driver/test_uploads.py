"""Work beside training, without Prefect: a stage in a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from tests.support.stages import beside, faking
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.run import Launch, Run
from trial_core.driver.uploads import Uploads
from trial_core.errors import StorageError
from trial_core.schedule.sequencer import Progress

STAGED = StagedCheckpoint.now("4f0c21aa", Progress(4), {})


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    store = CheckpointStore(f"file://{tmp_path}")
    return Launch(Run(toy_config(tmp_path), "toy-0a", tmp_path, store))


def test_training_continues_while_a_checkpoint_is_uploaded(launch: Launch) -> None:
    """It waits for the upload only at its end, or before the next one."""
    may_end, committed = threading.Event(), new_manifest()

    def upload(launch: Launch, staged: StagedCheckpoint) -> Manifest:
        assert may_end.wait(30)
        return committed

    launch.run.execute = faking(
        checkpoint_upload=beside(upload), checkpoint_prune=beside(lambda *_: None)
    )
    with Uploads(launch) as uploads:
        uploads.start(STAGED)
        assert uploads.is_busy
        uploads.poll()
        assert uploads.is_busy
        may_end.set()
        uploads.finish()
        assert not uploads.is_busy
    assert uploads.newest is committed


def test_an_upload_that_cannot_be_started_is_not_waited_for(launch: Launch) -> None:
    """As when no thread can be started."""

    def start(launch: Launch, staged: StagedCheckpoint) -> NoReturn:
        raise RuntimeError("can't start new thread")

    launch.run.execute = faking(checkpoint_upload=start)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        Uploads(launch) as uploads,
    ):
        uploads.start(STAGED)


def test_a_failed_upload_is_raised_where_training_waits_for_it(launch: Launch) -> None:
    """Not in its thread."""

    def upload(launch: Launch, staged: StagedCheckpoint) -> NoReturn:
        raise StorageError("the disk is full")

    launch.run.execute = faking(checkpoint_upload=beside(upload))
    with Uploads(launch) as uploads:
        uploads.start(STAGED)
        with pytest.raises(StorageError, match="the disk is full"):
            uploads.finish()
    assert uploads.newest is None
