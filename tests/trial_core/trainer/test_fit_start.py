"""What a fit starts from, and what it says of it; its ranks are made up, the storage is real."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from tests.trial_core.trainer.test_fit_loop import Told
from trial_core.checkpoint.manifest import Manifest, Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointDamaged, StorageError
from trial_core.messages import Fetched, Persisted, TrialBuilt
from trial_core.retention.claims import claim_run, claims
from trial_core.run.sequencer import Progress
from trial_core.trainer import background_upload
from trial_core.trainer.fit_stages import FitStages

TRIAL = "toy-0000beef"
TOPOLOGY = Topology(world_size=1, data_parallel_size=1)


class Fetching(Told):
    """Answers one request to fetch after the other with what it was given; then all is well.

    Attributes:
        needed: the checkpoints that were claimed by the time of each.
    """

    def __init__(self, store: CheckpointStore, *answers: Fetched) -> None:
        super().__init__()
        self.store, self.answers = store, list(answers)
        self.fetched: list[str] = []
        self.needed: list[list[str]] = []

    def fetch_checkpoint(self, request: Any) -> Fetched:
        self.fetched.append(request.uuid)
        self.needed.append([uuid for claim in claims(self.store) for uuid in claim.needs])
        return self.answers.pop(0) if self.answers else Fetched()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/checkpoints")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_upload, "PAUSE_SECONDS", 0.0)


def new_fit(store: CheckpointStore, told: Any, **more: Any) -> FitStages:
    built = TrialBuilt(hooks=[], topology=TOPOLOGY, batch_samples=1, versions={})
    config = script_config({"checkpointing": {"when_busy": "skip"}})
    return FitStages(
        told, built, RunInfo(TRIAL, {}), DistributedContext.from_environment({}), store, config,
        None, test_mode=False, **more,
    )  # fmt: skip


def saved(batches: int) -> Manifest:
    return new_manifest(batches, trial=TRIAL, topology=TOPOLOGY)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is said, with what is wrong."""
    newer, older = saved(8), saved(4)
    fit = new_fit(store, Fetching(store, Fetched(damage="shard.pt has 3 bytes")))
    assert (
        fit.fetch_start([ResumePoint.continuing(each) for each in (newer, older)]).uuid
        == older.uuid
    )
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.getMessage() == f"checkpoint {newer.uuid} cannot be used: shard.pt has 3 bytes"


def test_where_all_are_damaged_nothing_begins(store: CheckpointStore) -> None:
    """A trial that has saved is not trained from the beginning because of a flipped bit."""
    told = Fetching(store, Fetched(damage="a.pt is missing"), Fetched(damage="b.pt is missing"))
    starts = [ResumePoint.continuing(saved(8)), ResumePoint.continuing(saved(4))]
    with pytest.raises(CheckpointDamaged) as refusal:
        new_fit(store, told).fetch_start(starts)
    assert str(refusal.value).startswith(
        f"none of the 2 checkpoint(s) of trial {TRIAL} is intact; the last one tried: "
        "b.pt is missing. Put back its files, or start a new trial"
    )


def test_a_damaged_source_is_named_as_such(store: CheckpointStore) -> None:
    """It is the experiment that names it."""
    told = Fetching(store, Fetched(damage="a.pt is missing"))
    with pytest.raises(CheckpointDamaged, match=r"^searcher.source_checkpoint_uuid: a.pt is miss"):
        new_fit(store, told).fetch_start([ResumePoint.warm(saved(8), weights_only=True)])


def test_a_storage_that_fails_once_is_asked_again(store: CheckpointStore) -> None:
    """The same checkpoint is fetched on the second try."""
    told, newer = Fetching(store, Fetched(problem="HTTP 503")), saved(8)
    fit = new_fit(store, told)
    assert (
        fit.fetch_start([ResumePoint.continuing(newer), ResumePoint.continuing(saved(4))]).uuid
        == newer.uuid
    )
    assert told.fetched == [newer.uuid] * 2


def test_what_the_storage_does_not_give_is_not_taken_for_damaged(store: CheckpointStore) -> None:
    """It may be whole tomorrow: the fit ends rather than go on from an older one."""
    told, newer = Fetching(store, *[Fetched(problem="HTTP 503")] * 9), saved(8)
    starts = [ResumePoint.continuing(newer), ResumePoint.continuing(saved(4))]
    with pytest.raises(
        StorageError, match=f"^rank 0: checkpoint {newer.uuid} cannot be fetched: HTTP 503$"
    ):
        new_fit(store, told).fetch_start(starts)
    assert set(told.fetched) == {newer.uuid}


def test_what_is_fetched_has_been_claimed(store: CheckpointStore) -> None:
    """So that nobody's rules delete it: neither while it is fetched, nor before the fit has saved
    something better."""
    newer, older = saved(8), saved(4)
    told = Fetching(store, Fetched(damage="a.pt is missing"))
    with claim_run(store, TRIAL) as claim:
        fit = new_fit(store, told, claim=claim)
        fit.fetch_start([ResumePoint.continuing(newer), ResumePoint.continuing(older)])
        assert told.needed == [[newer.uuid], [older.uuid]]
        assert [held.needs for held in claims(store)] == [[older.uuid]]


class Busy(Told):
    """Stores nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def persist_checkpoint(self, request: Any) -> Persisted:
        assert self.may_end.wait(60)
        return super().persist_checkpoint(request)


@pytest.fixture
def busy() -> Iterator[Busy]:
    told = Busy()
    yield told
    told.may_end.set()


def test_an_optional_checkpoint_is_skipped_while_an_upload_is_under_way(
    store: CheckpointStore, busy: Busy, caplog: pytest.LogCaptureFixture
) -> None:
    """With `when_busy: skip`, and it is said, at which batch."""
    fit = new_fit(store, busy)
    fit.start_upload(fit.save(Progress(4)))
    assert not fit.has_room(is_optional=True)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.getMessage() == (
        "checkpoint skipped at batch 0: the last one is still being uploaded "
        "(checkpointing.when_busy: skip)"
    )
    busy.may_end.set()
    fit.finish_upload()


def test_one_that_is_not_optional_waits(
    store: CheckpointStore, busy: Busy, caplog: pytest.LogCaptureFixture
) -> None:
    """The best and the last one are saved whatever `when_busy` says, and the waiting is said."""
    caplog.set_level(logging.INFO)
    fit = new_fit(store, busy)
    fit.start_upload(staged := fit.save(Progress(4)))
    threading.Timer(0.2, busy.may_end.set).start()
    assert fit.has_room(is_optional=False)
    assert fit.newest == staged.uuid
    assert "training waits: the last checkpoint is still being uploaded" in caplog.messages
