"""The background upload of a flow run, without training."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from prefect.futures import PrefectConcurrentFuture

from tests.support.manifests import new_manifest
from tests.support.prefect import free_port, isolated
from tests.support.slots import toy_config
from tests.support.stages import beside, faking
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.run import Launch, Run
from trial_core.driver.uploads import Uploads
from trial_core.errors import SlotsError
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.schedule.sequencer import Progress
from trialflow.flows.server.prefect_settings import environment
from trialflow.tasks.stages import as_prefect_task


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A run without a Prefect server: every request to the server fails."""
    nowhere = f"http://127.0.0.1:{free_port()}/api"
    with environment({**isolated(tmp_path), "PREFECT_API_URL": nowhere}):
        store = CheckpointStore("memory://")
        yield Launch(Run(toy_config(tmp_path), "toy-0000beef", tmp_path, store))


STAGED = StagedCheckpoint.now("4f0c21aa", Progress(4), {})


def uploads_of(launch: Launch, future: Future[Manifest]) -> Uploads:
    """Uploads whose task ends with `future`."""
    started = PrefectConcurrentFuture(uuid.uuid4(), future)
    launch.run.execute = faking(
        as_prefect_task,
        checkpoint_upload=lambda launch, staged: started,
        checkpoint_prune=beside(lambda *_: None),
    )
    return Uploads(launch)


def test_polling_an_upload_does_not_ask_the_server(launch: Launch) -> None:
    """A running upload is left alone, and an ended one is taken."""
    future: Future[Manifest] = Future()
    with uploads_of(launch, future) as uploads:
        uploads.start(STAGED)
        uploads.poll()
        assert uploads.is_busy
        assert uploads.newest is None
        future.set_result(new_manifest())
        uploads.poll()
        assert not uploads.is_busy
        assert uploads.newest == future.result()


def test_waiting_for_an_upload_stalls_training(launch: Launch) -> None:
    """Its time is a checkpoint stall, and only while the run waits."""
    ticks = iter(range(1000))
    launch.run.clock = RunClock(now=lambda: float(next(ticks)))
    launch.run.clock.switch("idle")
    future: Future[Manifest] = Future()
    with uploads_of(launch, future) as uploads:
        uploads.start(STAGED)
        uploads.poll()
        assert "checkpoint_stall" not in launch.run.clock.slot_milliseconds()
        future.set_result(new_manifest())
        uploads.finish()
    assert launch.run.clock.slot_milliseconds()["checkpoint_stall"] == 1000


def test_no_upload_outlives_its_attempt(launch: Launch) -> None:
    """After a training failure, the end of the block waits for the upload."""
    future: Future[Manifest] = Future()
    training_failed = threading.Event()

    def upload() -> None:
        training_failed.wait()
        future.set_result(new_manifest())

    def train(uploads: Uploads) -> None:
        uploads.start(STAGED)
        training_failed.set()
        raise SlotsError("the ranks are gone")

    threading.Thread(target=upload, daemon=True).start()
    with pytest.raises(SlotsError), uploads_of(launch, future) as uploads:
        train(uploads)
    assert future.done()
