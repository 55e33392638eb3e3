"""The flow's one upload beside training, without the training."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from prefect.futures import PrefectConcurrentFuture

import trialflow.flows.uploads
from tests.support.prefect import free_port, isolated
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.checkpointing_section import CheckpointingConfig
from trial_core.errors import SlotsError
from trial_core.run.observer import Observer
from trial_core.run.sequencer import Progress
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trialflow.flows.server.prefect_settings import environment
from trialflow.flows.uploads import Uploads
from trialflow.tasks.run import TrialRun

SKIP = CheckpointingConfig(when_busy="skip")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrialRun]:
    """A run whose Prefect server does not exist: whoever asks it anything fails."""
    nowhere = f"http://127.0.0.1:{free_port()}/api"
    with environment({**isolated(tmp_path), "PREFECT_API_URL": nowhere}):
        store = CheckpointStore("memory://")
        yield TrialRun(toy_config(tmp_path), "toy-0000beef", tmp_path, store, Observer())


def manifest(run: TrialRun) -> Manifest:
    staged = StagedCheckpoint.now(str(uuid.uuid4()), Progress(4), run.metrics)
    entry = FileEntry(path="shard", size_bytes=0, digest=f"sha256:{'0' * 64}", rank=0)
    topology = Topology(world_size=1, data_parallel_size=1)
    return staged.manifest(
        {0: [entry]}, trial=run.trial, attempt=run.attempt, config=run.config,
        topology=topology, versions={},
    )  # fmt: skip


def test_an_upload_is_settled_without_asking_the_server(run: TrialRun) -> None:
    """Between stages: left alone while under way, and taken when it has ended."""
    future: Future[Manifest] = Future()
    with Uploads(run) as uploads:
        uploads.start(PrefectConcurrentFuture(uuid.uuid4(), future))
        uploads.settle()
        assert uploads.newest is None
        future.set_result(manifest(run))
        uploads.settle()
        assert uploads.newest == future.result()


def test_no_upload_outlives_its_attempt(run: TrialRun) -> None:
    """When training fails its ranks go; whatever still stores what they staged is waited for."""
    future: Future[Manifest] = Future()
    training_failed = threading.Event()

    def upload() -> None:
        training_failed.wait()
        future.set_result(manifest(run))

    def train(uploads: Uploads) -> None:
        uploads.start(PrefectConcurrentFuture(uuid.uuid4(), future))
        training_failed.set()
        raise SlotsError("the ranks are gone")

    threading.Thread(target=upload, daemon=True).start()
    with pytest.raises(SlotsError), Uploads(run) as uploads:
        train(uploads)
    assert future.done()


@pytest.mark.parametrize("is_optional", [True, False])
def test_while_an_upload_is_under_way_only_optional_checkpoints_are_skipped(
    run: TrialRun,
    is_optional: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With `when_busy: skip`, the next period's checkpoint will do; the best and last ones wait.
    Either is said."""
    run.config = run.config.model_copy(update={"checkpointing": SKIP})
    future: Future[Manifest] = Future()
    # Outside of a flow run there is no run's logger.
    monkeypatch.setattr(trialflow.flows.uploads, "get_run_logger", lambda: logging.getLogger("run"))
    caplog.set_level(logging.INFO, "run")
    with Uploads(run) as uploads:
        uploads.start(PrefectConcurrentFuture(uuid.uuid4(), future))
        timer = threading.Timer(0.2, lambda: future.set_result(manifest(run)))
        timer.start()
        assert uploads.have_room(is_optional) is not is_optional
        assert future.done() is not is_optional
    (said,) = [record.getMessage() for record in caplog.records if record.name == "run"]
    assert said.startswith("checkpoint skipped at batch 0" if is_optional else "training waits")
