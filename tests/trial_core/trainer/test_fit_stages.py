"""The stages of a fit, with a fake controller on one rank and a real storage."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Manifest, Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointError, StorageError, Superseded, TrialError
from trial_core.ledger.run_clock import RunClock
from trial_core.messages import (
    Fetched,
    HookDone,
    LoadersBuilt,
    MetricsNamed,
    Persisted,
    Saved,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.retention.claims import claim_run, claims
from trial_core.run.run_loop import follow_schedule
from trial_core.run.sequencer import Progress, Schedule
from trial_core.trainer import background_upload
from trial_core.trainer.fit_stages import FitStages
from trial_core.units import Batch

TRIAL = "toy-0000beef"
TOPOLOGY = Topology(world_size=1, data_parallel_size=1)


class FakeController:
    """Does nothing, and records what it is asked to do.

    Attributes:
        mistake: the mistake of every checkpoint that it persists.
        answers: its next answers to requests to fetch; afterwards every fetch succeeds.
        validations: the metrics of its next validations; afterwards a loss of 0.5.
        changed: the metrics as on_validation_end leaves them.
        claimed: the checkpoints that were claimed at the time of each fetch.
        on_hook: called with the name of each hook.
        may_persist: set once uploads may end.
    """

    def __init__(self, store: CheckpointStore, *answers: Fetched) -> None:
        self.store, self.answers = store, list(answers)
        self.mistake: str | None = None
        self.validations: list[dict[str, float]] = []
        self.changed: dict[str, float] | None = None
        self.calls: list[str] = []
        self.fetched: list[str] = []
        self.claimed: list[list[str]] = []
        self.on_hook: Any = lambda hook: None
        self.may_persist = threading.Event()
        self.may_persist.set()

    def fetch_checkpoint(self, request: Any) -> Fetched:
        self.fetched.append(request.uuid)
        self.claimed.append([uuid for claim in claims(self.store) for uuid in claim.needs])
        return self.answers.pop(0) if self.answers else Fetched()

    def build_loaders(self, request: Any) -> LoadersBuilt:
        return LoadersBuilt(epoch=None)

    def name_metrics(self, request: Any) -> MetricsNamed:
        return MetricsNamed(names=None)

    def train(self, request: Any) -> Trained:
        self.calls.append(f"train until {request.until}")
        return Trained(batches_trained=request.until, metrics={}, seconds=1.0, stop_requested=False)

    def validate(self, request: Any) -> Validated:
        self.calls.append("validate")
        metrics = self.validations.pop(0) if self.validations else {"loss": 0.5}
        return Validated(metrics=metrics, seconds=1.0, stop_requested=False)

    def save_checkpoint(self, request: Any) -> Saved:
        self.calls.append("save")
        return Saved(staging="", seconds=1.0)

    def persist_checkpoint(self, request: Any) -> Persisted:
        assert self.may_persist.wait(60)
        return Persisted(files=[], seconds=1.0, mistake=self.mistake)

    def run_hook(self, request: Any) -> HookDone:
        self.calls.append(request.hook)
        self.on_hook(request.hook)
        is_end = request.hook == "on_validation_end"
        return HookDone(stop_requested=False, metrics=self.changed if is_end else None)

    def release_staging(self, request: Any) -> None: ...

    def finish_run_files(self, request: Any) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/checkpoints")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_upload, "PAUSE_SECONDS", 0.0)


def new_fit(controller: FakeController, metric: str = "loss", **more: Any) -> FitStages:
    """A fit of 7 batches that validates and saves every 3."""
    hooks = ["on_validation_end", "on_checkpoint_upload_end", "on_trial_shutdown"]
    driven: Any = controller
    every = Batch(3)
    return FitStages(
        driven,
        TrialBuilt(hooks=hooks, topology=TOPOLOGY, batch_samples=1, versions={}),
        RunInfo(TRIAL, {}),
        DistributedContext.from_environment({}),
        controller.store,
        script_config({}),
        Schedule(Batch(7), Batch(7), validation_period=every, checkpoint_period=every),
        [ResumePoint()],
        metric,
        **more,
    )


def saved(batches: int) -> Manifest:
    return new_manifest(batches, trial=TRIAL, topology=TOPOLOGY)


def test_a_missing_searcher_metric_costs_no_training(store: CheckpointStore) -> None:
    """The fit saves, shuts the trial down, and then raises the error."""
    controller = FakeController(store)
    with pytest.raises(TrialError, match=r'searcher.metric "accuracy" is not among .*: loss\.'):
        follow_schedule(new_fit(controller, "accuracy"))
    assert controller.calls == [
        "train until 3", "validate", "on_validation_end", "save", "on_checkpoint_upload_end",
        "on_trial_shutdown",
    ]  # fmt: skip
    (manifest,) = store.list()
    # Not validated: a resumed fit, with the right name, validates this state first.
    assert (manifest.progress.batches_trained, manifest.progress.validated_at) == (3, None)


def test_metrics_that_on_validation_end_has_changed_count(store: CheckpointStore) -> None:
    """As the searcher metric, in the checkpoints and in the result."""
    controller = FakeController(store)
    controller.changed = {"perplexity": 2.0}
    result = follow_schedule(new_fit(controller, "perplexity"))
    assert result.validation_metrics == {"perplexity": 2.0}
    assert store.list()[-1].metrics["validation"] == {"perplexity": 2.0}


def test_metrics_without_the_searcher_metric_are_no_validation(store: CheckpointStore) -> None:
    """The checkpoint names the last validation that counts, with the metrics of that one."""
    controller = FakeController(store)
    controller.validations = [{"loss": 0.25}, {"lost": 0.125}]
    with pytest.raises(TrialError, match=r'"loss" is not among .*: lost\. Set '):
        follow_schedule(new_fit(controller))
    last = store.list()[-1]
    assert (last.progress.batches_trained, last.metrics.get("validation")) == (6, None)
    assert (last.validated_at, last.earlier_validation) == (3, {"loss": 0.25})


def test_files_that_no_checkpoint_can_have_end_the_fit(store: CheckpointStore) -> None:
    """With the rank's message and without a retry, which would end the same way."""
    controller = FakeController(store)
    controller.mistake = "rank 0 saved a file 'odd': use another name"
    with pytest.raises(CheckpointError, match=r"rank 0 saved a file 'odd': use another name$"):
        follow_schedule(new_fit(controller))


def test_a_superseded_fit_ends(store: CheckpointStore) -> None:
    """What it had committed before is kept; its next commit is refused, which ends it."""
    controller = FakeController(store)

    def take_over(hook: str) -> None:
        if hook == "on_checkpoint_upload_end":
            store.take_over(TRIAL, "another")

    controller.on_hook = take_over
    fit = new_fit(controller, fence=store.take_over(TRIAL, "this one"))
    with pytest.raises(Superseded, match=r"attempt another, by .* this is attempt this one"):
        follow_schedule(fit)
    (manifest,) = store.list()
    assert (manifest.progress.batches_trained, manifest.attempt) == (3, "this one")


def test_a_damaged_checkpoint_is_logged(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error, with the damage."""
    controller, manifest = FakeController(store, Fetched(damage="shard.pt has 3 bytes")), saved(8)
    damage = new_fit(controller).fetch(ResumePoint.continuing(manifest))
    assert damage == "shard.pt has 3 bytes"
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"checkpoint {manifest.uuid} cannot be used: {damage}"


def test_a_fetch_is_retried_if_the_storage_fails(store: CheckpointStore) -> None:
    """The same checkpoint is fetched on the second try."""
    controller, manifest = FakeController(store, Fetched(problem="HTTP 503")), saved(8)
    assert new_fit(controller).fetch(ResumePoint.continuing(manifest)) is None
    assert controller.fetched == [manifest.uuid] * 2


def test_a_storage_failure_is_not_damage(store: CheckpointStore) -> None:
    """The checkpoint may be intact, so the fit ends and does not use an older one."""
    controller, manifest = FakeController(store, *[Fetched(problem="HTTP 503")] * 9), saved(8)
    expected = f"^rank 0: checkpoint {manifest.uuid} cannot be fetched: HTTP 503$"
    with pytest.raises(StorageError, match=expected):
        new_fit(controller).fetch(ResumePoint.continuing(manifest))


def test_a_checkpoint_is_claimed_before_it_is_fetched(store: CheckpointStore) -> None:
    """So that no prune deletes it meanwhile, or before the fit has saved a newer one."""
    controller, newer, older = FakeController(store), saved(8), saved(4)
    store.commit(newer)
    store.commit(older)
    with claim_run(store, TRIAL) as claim:
        fit = new_fit(controller, claim=claim)
        for manifest in (newer, older):
            fit.fetch(ResumePoint.continuing(manifest))
        assert controller.claimed == [[newer.uuid], [older.uuid]]
        assert [held.needs for held in claims(store)] == [[older.uuid]]


def test_an_upload_runs_beside_training(store: CheckpointStore) -> None:
    """It is left alone while it runs, and its hook follows its end."""
    controller = FakeController(store)
    controller.may_persist.clear()
    fit = new_fit(controller)
    staged = fit.save(Progress(4))
    fit.start_upload(staged)
    assert not fit.poll()
    assert fit.is_uploading
    assert fit.newest_checkpoint is None
    controller.may_persist.set()
    fit.finish_upload()
    assert not fit.is_uploading
    assert fit.newest_checkpoint == staged.uuid
    assert controller.calls == ["save", "on_checkpoint_upload_end"]


def test_test_mode_trains_one_batch_and_uploads_nothing(store: CheckpointStore) -> None:
    """From wherever the fit resumes."""
    fit = new_fit(FakeController(store), test_mode=True)
    assert fit.schedule(Progress(4)).max_length == Batch(5)
    fit.start_upload(fit.save(Progress(5)))
    assert not fit.is_uploading


def test_the_time_of_a_fit(store: CheckpointStore) -> None:
    """Each stage counts in its bucket; batches that an earlier fit has trained are redone."""
    now = 1000.0
    clock = RunClock(now=lambda: now)
    clock.has_slots(2)
    clock.switch("idle")
    clock.continues(5)

    class Slow(FakeController):
        """Takes 3 s to fetch, 7 to build, 2 of them to restore, and so on."""

        def fetch_checkpoint(self, request: Any) -> Fetched:
            return after(3, super().fetch_checkpoint(request))

        def build_loaders(self, request: Any) -> LoadersBuilt:
            return after(7, LoadersBuilt(epoch=None, restore_seconds=2.0))

        def train(self, request: Any) -> Trained:
            return after(11, super().train(request))

        def validate(self, request: Any) -> Validated:
            return after(13, super().validate(request))

        def save_checkpoint(self, request: Any) -> Saved:
            return after(17, super().save_checkpoint(request))

        def run_hook(self, request: Any) -> HookDone:
            return after(
                19 if request.hook == "on_validation_end" else 0, super().run_hook(request)
            )

    def after(seconds: float, result: Any) -> Any:
        nonlocal now
        now += seconds
        return result

    manifest = saved(4)
    fit = new_fit(Slow(store), clock=clock)
    fit.points = [ResumePoint.continuing(manifest)]
    follow_schedule(fit)
    # Trained from 4 to 6 and to 7: batch 5 is redone, half of the first workload.
    assert clock.slot_milliseconds() == {
        "build": 10_000, "restore": 10_000, "train": 33_000, "redone": 11_000,
        "validate": 2 * 2 * (13 + 19) * 1000, "checkpoint_stall": 2 * 2 * 17 * 1000,
    }  # fmt: skip
