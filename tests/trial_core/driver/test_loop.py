"""The loop, with stages that only record their calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from tests.support.stages import all_stages, faking
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import StagedCheckpoint
from trial_core.driver.loop import Loop
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Launch, Run
from trial_core.driver.uploads import Uploads
from trial_core.errors import CheckpointDamaged, TrialError, WeightsChanged
from trial_core.observe.events.observers import Observer
from trial_core.schedule.sequencer import Progress, Schedule
from trial_core.schedule.units import Batch

MISTAKE = TrialError("the losses are not finite")
HOOKS = frozenset((
    "on_trial_startup", "on_training_start", "on_training_workload_end", "on_validation_end",
    "on_checkpoint_write_end", "on_checkpoint_end", "on_checkpoint_upload_end",
    "on_trial_shutdown",
))  # fmt: skip


class Recorded(Observer):
    """The stages of a run, and what else the loop calls. Every validation gives a better metric.

    Attributes:
        calls: the calls so far.
        upload_is_slow: an upload ends only when it is waited for.
        refused_at: rank 1 has copied the checkpoints after so many batches wrongly, once each.
        uploads_until: an upload also ends once so many batches are trained.
        stops_at: the trial requests a stop once so many batches are trained.
        interrupted_at: the validation after so many batches ends early, with a stop request.
        reports: the names of the validation metrics.
        lacks_metric_at: validations after so many batches report other metrics.
        names: those that a batch of the validation set tells before training; None: it cannot.
        may_add_metrics: a callback may add metrics.
        fails_at: the losses are not finite once so many batches are trained, and end the run.
        points: the resume points.
        damage: of checkpoints, by uuid.
    """

    def __init__(self, folder: Path, metric: str | None = None, **schedule: Any) -> None:
        self.calls: list[str] = []
        self.upload_is_slow = False
        self.uploads_until = self.stops_at = self.fails_at = 10**6
        self.interrupted_at: int | None = None
        self.refused_at: set[int] = set()
        self.reports = ["loss"]
        self.lacks_metric_at: set[int] = set()
        self.notices: list[str] = []
        self.names: list[str] | None = None
        self.may_add_metrics = False
        self.points: list[ResumePoint] = [ResumePoint()]
        self.damage: dict[str | None, str] = {}
        self.postpones_when_busy = False
        self.schedule = Schedule(
            **{"max_length": Batch(6), "reporting_period": Batch(5), **schedule}
        )
        config = toy_config(folder)
        searcher = config.searcher.model_copy(update={"metric": metric})
        clock = SimpleNamespace(spending=self._spending)
        self.run = Run(
            config.model_copy(update={"searcher": searcher}), "toy-0000beef", folder,
            CheckpointStore(f"file://{folder}"), observer=self, has_metric=metric is not None,
            clock=clock, how_to_go_on="give a greater length",  # type: ignore[arg-type]
            choose_resume_points=lambda *_: iter(self.points),
            find_logger=lambda: logging.getLogger("recorded"),
        )  # fmt: skip
        self.launch = launch = Launch(self.run)
        launch.slots = SimpleNamespace(  # type: ignore[assignment]
            break_training=lambda: self.calls.append("break"),
            request=lambda asked, *_, **__: self.calls.append(f"release {asked.uuid}"),
        )
        launch.losses = SimpleNamespace(  # type: ignore[assignment]
            failure=lambda is_last, saved_at: MISTAKE if self._has_failed else None,
            withholds_checkpoint=lambda is_last: self._has_failed,
            since=0,
            validated=lambda *_: [],
        )
        launch.answers.hooks = HOOKS
        launch.answers.writes_run_files = True
        self._trained = 0
        self._upload: Future[Any] | None = None
        self._staged = ""

    def follow(self) -> TrialResult:
        """Run the loop."""
        checkpointing = self.run.config.checkpointing.model_copy(
            update={"when_busy": "postpone" if self.postpones_when_busy else "wait"}
        )
        self.run.config = self.run.config.model_copy(update={"checkpointing": checkpointing})
        own = {name: getattr(self, name) for name in all_stages() if hasattr(self, name)}
        self.run.execute = faking(**own)
        with Uploads(self.launch) as uploads:
            return Loop(self.launch, uploads, self.schedule).run()

    @property
    def _has_failed(self) -> bool:
        return self._trained >= self.fails_at

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        self._end_upload()
        yield

    def _end_upload(self) -> None:
        if self._upload is not None:
            done, self._upload = self._upload, None
            if (batches := int(self._staged[5:])) in self.refused_at:
                self.refused_at = self.refused_at - {batches}
                self.launch.has_refused = True
                done.set_exception(WeightsChanged("rank 1: the trial has changed weights"))
                return
            done.set_result(SimpleNamespace(uuid=self._staged, progress=Progress(batches)))

    # --------------------------------------------------------------------------------- stages

    def fetch_checkpoint(self, launch: Launch, manifest: Any, restore: Any) -> str | None:
        return self.damage.get(manifest.uuid)

    def build_loaders(self, launch: Launch, point: ResumePoint) -> None:
        self.calls.append(f"build loaders {point.progress.batches_trained}")

    def callbacks(self, launch: Launch, hook: str, batches: int, arguments: dict[str, Any]) -> None:
        named = "uploaded" if hook == "on_checkpoint_upload_end" else f"{hook} {batches}"
        self.calls.append(" ".join([named, *map(str, arguments.values())]))

    def check_metrics(self, launch: Launch) -> list[str] | None:
        self.calls.append("name metrics")
        launch.answers.may_add_metrics = self.may_add_metrics
        return self.names

    def train_workload(self, launch: Launch, begin: int, until: int) -> int:
        self._trained = min(until, max(begin, self.stops_at))
        self.calls.append(f"train {begin} {self._trained}")
        if self._trained >= self.uploads_until:
            self._end_upload()
        if self._trained >= self.stops_at:
            launch.answers.stop_requested = True
        launch.answers.metrics["training"] = {"loss": -self._trained}
        return self._trained

    def validate(self, launch: Launch, batches: int) -> bool:
        self.calls.append(f"validate {batches}")
        reports = ["other"] if batches in self.lacks_metric_at else self.reports
        launch.answers.validated = dict.fromkeys(reports, -batches)
        if batches == self.interrupted_at:
            launch.answers.stop_requested = True
        return batches != self.interrupted_at

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def metrics_reported(self, kind: Any, batches: int, metrics: Any) -> None:
        self.calls.append(f"report {batches}")

    def checkpoint_save(self, launch: Launch, progress: Progress) -> StagedCheckpoint:
        self.calls.append(f"save {progress.batches_trained}")
        return StagedCheckpoint.now(f"uuid-{progress.batches_trained}", progress, {})

    def checkpoint_upload(self, launch: Launch, staged: StagedCheckpoint) -> Future[Any]:
        assert self._upload is None
        started: Future[Any] = Future()
        self._upload, self._staged = started, staged.uuid
        if not self.upload_is_slow:
            self._end_upload()
        return started

    def checkpoint_prune(self, launch: Launch, policy: Any, batches: int) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def upload_run_files(self, launch: Launch, batches: int) -> str:
        self.calls.append("finish")
        return "file:///tensorboard"


def test_stages_and_hooks_in_their_order(tmp_path: Path) -> None:
    """Workloads of 5, validations every 3 and checkpoints every 4 batches, and one at batch 0."""
    stages = Recorded(
        tmp_path, validation_period=Batch(3), checkpoint_period=Batch(4), checkpoint_policy="none",
        step_zero_validation=True,
    )  # fmt: skip
    result = stages.follow()
    assert stages.calls == [
        "on_trial_startup 0 0 None", "build loaders 0", "on_training_start 0",
        "validate 0", "on_validation_end 0", "report 0",
        "train 0 3", "on_training_workload_end 3", "validate 3", "on_validation_end 3", "report 3",
        "train 3 4", "on_training_workload_end 4",
        "save 4", "on_checkpoint_write_end 4", "on_checkpoint_end 4", "uploaded uuid-4",
        "train 4 5", "on_training_workload_end 5",
        "train 5 6", "on_training_workload_end 6", "validate 6", "on_validation_end 6", "report 6",
        "save 6", "on_checkpoint_write_end 6", "on_checkpoint_end 6", "uploaded uuid-6",
        "on_trial_shutdown 6", "finish",
    ]  # fmt: skip
    assert (result.trial, result.batches_trained) == ("toy-0000beef", 6)
    assert not result.stopped_early
    assert result.training_metrics == {"loss": -6}
    assert result.checkpoint_uuid == "uuid-6"
    assert str(result.checkpoint_url).endswith("/checkpoints/uuid-6")


def test_a_run_that_should_stop_saves_and_ends(tmp_path: Path) -> None:
    """It neither trains nor validates any more."""
    stages = Recorded(tmp_path)
    stages.stops_at = 2
    result = stages.follow()
    assert stages.calls[3:] == [
        "train 0 2", "on_training_workload_end 2",
        "save 2", "on_checkpoint_write_end 2", "on_checkpoint_end 2", "uploaded uuid-2",
        "on_trial_shutdown 2", "finish",
    ]  # fmt: skip
    assert result.stopped_early


def test_a_run_whose_losses_fail_saves_nothing_more(tmp_path: Path) -> None:
    """It neither trains nor validates any more, and shuts the trial down."""
    stages = Recorded(tmp_path, checkpoint_period=Batch(2), validation_period=Batch(4))
    stages.fails_at = 4
    with pytest.raises(TrialError, match="the losses are not finite"):
        stages.follow()
    assert stages.calls[3:] == [
        "train 0 2", "on_training_workload_end 2",
        "save 2", "on_checkpoint_write_end 2", "on_checkpoint_end 2", "uploaded uuid-2",
        "train 2 4", "on_training_workload_end 4", "on_trial_shutdown 4", "finish",
    ]  # fmt: skip


def test_a_validation_without_the_searcher_metric_is_repeated(tmp_path: Path) -> None:
    """By a run that continues with a metric that is reported; one that counted is not."""
    seen = []
    for best in (None, 0.5):
        stages = Recorded(tmp_path, "loss")
        progress = Progress(6, validated_at=6, checkpointed_at=6, best_metric=best)
        metrics = {"validation": {"loss": 0.5}}
        manifest = new_manifest(6, progress=progress, metrics=metrics)
        stages.points = [ResumePoint.continuing(manifest)]
        stages.follow()
        seen.append("validate 6" in stages.calls)
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("then", "repeats"),
    [
        ({"metric": "loss", "smaller_is_better": True}, False),
        ({"metric": "accuracy", "smaller_is_better": True}, True),
        ({"metric": "loss", "smaller_is_better": False}, True),
        ({}, False),  # not recorded
    ],
)
def test_the_best_value_of_another_metric_does_not_count(
    tmp_path: Path, then: dict[str, Any], repeats: bool
) -> None:
    """Nor that of another direction: the run validates again, and saves what is the best now."""
    progress = Progress(2, validated_at=2, checkpointed_at=2, best_metric=-50.0)
    metrics, config = {"validation": {"loss": 0.5}}, {"searcher": then}
    saved = new_manifest(2, progress=progress, metrics=metrics, config=config)
    stages = Recorded(tmp_path, "loss", validation_period=Batch(2))
    stages.points = [ResumePoint.continuing(saved)]
    stages.follow()
    assert [call for call in stages.calls if call.startswith("save")] == (
        ["save 2", "save 4", "save 6"] if repeats else ["save 6"]
    )
    assert ("validate 2" in stages.calls) == repeats


def test_a_validation_that_ends_early_has_no_hook(tmp_path: Path) -> None:
    """The checkpoint does not count as validated."""
    stages = Recorded(tmp_path, validation_period=Batch(4))
    stages.interrupted_at = 4
    assert stages.follow().stopped_early
    assert "validate 4" in stages.calls
    assert "on_validation_end 4" not in stages.calls


def test_a_validation_without_the_searcher_metric_is_warned_of(tmp_path: Path) -> None:
    """The run trains on. Two in a row end it, after it has saved and shut the trial down."""
    stages = Recorded(tmp_path, "loss", max_length=Batch(16), validation_period=Batch(3))
    stages.lacks_metric_at = {3, 9, 12}
    with pytest.raises(TrialError, match="is not among the validation metrics"):
        stages.follow()
    seen = [call for call in stages.calls if call.startswith(("validate", "save", "on_trial_sh"))]
    assert seen == [
        "validate 3", "validate 6", "save 6", "validate 9", "validate 12", "save 12",
        "on_trial_shutdown 12",
    ]  # fmt: skip
    assert [text.partition(":")[0] for text in stages.notices] == [
        "this validation does not count as the best"
    ] * 2


def test_a_metric_that_no_validation_reports_is_found_before_training(tmp_path: Path) -> None:
    """The trial is shut down; there is nothing to save."""
    stages = Recorded(tmp_path, "accuracy")
    stages.names = ["loss", "mean"]
    with pytest.raises(TrialError) as error:
        stages.follow()
    assert str(error.value) == (
        'searcher.metric "accuracy" is not among the validation metrics that the trial reports: '
        'loss, mean. Set searcher.metric to one of these, or report "accuracy" in the trial\'s '
        "validation"
    )
    assert stages.calls[2:] == [
        "on_training_start 0", "name metrics", "on_trial_shutdown 0", "finish"
    ]  # fmt: skip


def test_a_metric_that_a_callback_may_add_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run trains; its first validation tells."""
    stages = Recorded(tmp_path, "perplexity")
    stages.names, stages.may_add_metrics, stages.reports = ["loss"], True, ["perplexity"]
    with caplog.at_level(logging.WARNING):
        assert stages.follow().batches_trained == 6
    assert 'searcher.metric "perplexity" is not among' in caplog.text
    assert "or add it in on_validation_end" in caplog.text


@pytest.mark.parametrize("names", [None, ["accuracy"]])
def test_a_run_whose_metric_may_be_reported_trains(tmp_path: Path, names: list[str] | None) -> None:
    """Some trials' metrics are known only after a whole validation."""
    stages = Recorded(tmp_path, "accuracy")
    stages.names, stages.reports = names, ["accuracy"]
    assert stages.follow().batches_trained == 6


@pytest.mark.parametrize("case", ["no metric", "reported before", "validates first", "is over"])
def test_the_metrics_names_are_not_looked_for_in_vain(tmp_path: Path, case: str) -> None:
    """Without a searcher metric, or where a validation has told or tells them first."""
    metric = None if case == "no metric" else "loss"
    stages = Recorded(tmp_path, metric, step_zero_validation=case == "validates first")
    reported = {"validation": {"loss": 0.5}} if case == "reported before" else {}
    batches = 6 if case == "is over" else 4
    progress = Progress(batches, validated_at=2 if reported else None)
    manifest = new_manifest(batches, progress=progress, metrics=reported)
    stages.points = [ResumePoint.continuing(manifest)]
    if case in ("no metric", "validates first"):
        stages.points = [ResumePoint()]
    stages.follow()
    assert "name metrics" not in stages.calls


@pytest.mark.parametrize(("postpones", "saved"), [(True, [4, 9, 12, 13]), (False, [4, 8, 12, 13])])
def test_only_optional_checkpoints_are_postponed_during_an_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, postpones: bool, saved: list[int]
) -> None:
    """With `when_busy: postpone`, until a workload ends after the upload; and so does one then. The
    last checkpoint waits for the upload. Both cases are logged, once."""
    stages = Recorded(
        tmp_path, max_length=Batch(13), checkpoint_period=Batch(4), checkpoint_policy="none",
        reporting_period=Batch(3),
    )  # fmt: skip
    stages.upload_is_slow, stages.postpones_when_busy, stages.uploads_until = True, postpones, 9
    with caplog.at_level(logging.INFO, "recorded"):
        stages.follow()
    assert [call for call in stages.calls if call.startswith("save")] == [
        f"save {batches}" for batches in saved
    ]
    assert stages.calls.count("break") == postpones
    postponed = "the checkpoint at batch 8 is postponed: the last one is still being uploaded"
    assert caplog.messages.count(postponed) == postpones
    waits = caplog.messages.count("training waits: the last checkpoint is still being uploaded")
    assert waits == (0 if postpones else 1)


def test_a_last_checkpoint_is_not_postponed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the upload before it."""
    stages = Recorded(tmp_path, checkpoint_period=Batch(4), checkpoint_policy="none")
    stages.upload_is_slow = stages.postpones_when_busy = True
    with caplog.at_level(logging.INFO, "recorded"):
        stages.follow()
    assert [call for call in stages.calls if call.startswith("save")] == ["save 4", "save 6"]
    assert "training waits: the last checkpoint is still being uploaded" in caplog.messages


def test_a_continuous_checkpoint_follows_an_upload_and_waits_for_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After each train-workload without an upload; the last one waits. No warning is due."""
    stages = Recorded(
        tmp_path, max_length=Batch(9), reporting_period=Batch(2), checkpoint_period="continuous",
        checkpoint_policy="none",
    )  # fmt: skip
    stages.uploads_until, stages.upload_is_slow = 6, True
    with caplog.at_level(logging.WARNING, "recorded"):
        stages.follow()
    saved = [call for call in stages.calls if call.startswith(("save", "uploaded"))]
    assert saved == [
        call for batches in (2, 6, 8, 9) for call in (f"save {batches}", f"uploaded uuid-{batches}")
    ]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"refused_at": {4}, "uploads_until": 6}, "4 release-4 6 8 12 13"),
        ({"refused_at": {4}}, "4 release-4 8 12 13"),
        ({"refused_at": {4}, "stops_at": 6}, "4 release-4 6"),
        ({"refused_at": {13}}, "4 8 12 13 release-13 13"),
        ({"refused_at": {6}, "stops_at": 6}, "4 6 release-6 6"),
    ],
    ids=["between", "before the next", "at a stop", "the last", "the last of a stop"],
)
def test_a_checkpoint_that_ranks_copied_wrongly_is_saved_again(
    tmp_path: Path, changes: dict[str, Any], saved: str
) -> None:
    """As soon as that is known, by the same ranks; no batch is trained twice."""
    stages = Recorded(
        tmp_path, max_length=Batch(13), checkpoint_period=Batch(4), checkpoint_policy="none",
        reporting_period=Batch(3),
    )  # fmt: skip
    stages.upload_is_slow = True
    vars(stages).update(changes)
    result = stages.follow()
    trained = [call.split()[1:] for call in stages.calls if call.startswith("train")]
    assert all(before[1] == after[0] for before, after in pairwise(trained))
    seen = [call.split() for call in stages.calls if call.startswith(("save", "release"))]
    assert [of if what == "save" else f"release-{of[5:]}" for what, of in seen] == saved.split()
    assert stages.calls.count("break") == 1  # the workload that trains meanwhile
    (notice,) = stages.notices
    assert "is not stored: rank 1: the trial has changed weights. The ranks save again" in notice
    assert (result.checkpoint_uuid, result.checkpoint_at) == (
        f"uuid-{result.batches_trained}", result.batches_trained
    )  # fmt: skip


def test_a_refused_checkpoint_does_not_count_where_none_can_be_saved(tmp_path: Path) -> None:
    """The losses are not finite when it is known."""
    stages = Recorded(tmp_path, max_length=Batch(13), checkpoint_period=Batch(4))
    stages.upload_is_slow, stages.refused_at, stages.fails_at = True, {8}, 9
    with pytest.raises(TrialError, match="the losses are not finite"):
        stages.follow()
    assert stages.launch.status.saved_at == 4


def test_a_resumed_run_continues_from_the_first_intact_checkpoint(tmp_path: Path) -> None:
    """Hooks get its batch and uuid, and its metrics are kept until there are newer ones."""
    validated = Progress(4, validated_at=3)
    newer = new_manifest(6)
    older = new_manifest(4, progress=validated, metrics={"validation": {"loss": 0.5}})
    stages = Recorded(tmp_path)
    stages.stops_at = 5
    stages.launch.answers.metrics["validation"] = {"lost with": "the ranks"}
    stages.points = [ResumePoint.continuing(each) for each in (newer, older)]
    stages.damage = {newer.uuid: "it lacks a file"}
    result = stages.follow()
    assert stages.calls[0] == f"on_trial_startup 4 4 {older.uuid}"
    assert stages.calls[3] == "train 4 5"
    assert (result.validated_at, result.validation_metrics) == (3, {"loss": 0.5})
    (notice,) = stages.notices
    assert notice == (
        f"training continues from batch 4, checkpoint {older.uuid}: checkpoint {newer.uuid} at "
        "batch 6 cannot be used: it lacks a file"
    )


def test_metrics_of_lost_batches_are_forgotten(tmp_path: Path) -> None:
    """New ranks begin without a checkpoint: what the dead ranks had measured is not of this run."""
    stages = Recorded(tmp_path)
    stages.launch.answers.metrics["validation"] = {"loss": 0.5}
    stages.stops_at = 2
    result = stages.follow()
    assert (result.validated_at, result.validation_metrics) == (None, {})


def test_a_run_with_nothing_left_to_do_gives_its_own_checkpoint(tmp_path: Path) -> None:
    """A warm start's source checkpoint is not the trial's own."""
    done = new_manifest(progress=Progress(6, validated_at=6, checkpointed_at=6))
    stages = Recorded(tmp_path)
    stages.points = [ResumePoint.continuing(done)]
    assert stages.follow().checkpoint_uuid == done.uuid
    stages = Recorded(tmp_path)
    stages.stops_at = 0
    stages.points = [ResumePoint.warm(done, weights_only=True)]
    assert stages.follow().checkpoint_uuid is None


def test_a_trial_that_is_already_at_its_end_says_how_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a second start of a script ends without a word."""
    stages = Recorded(tmp_path)
    done = Progress(6, validated_at=6, checkpointed_at=6)
    stages.points = [ResumePoint.continuing(new_manifest(progress=done))]
    with caplog.at_level(logging.INFO, "recorded"):
        stages.follow()
    assert caplog.messages[-1] == (
        "trial toy-0000beef is already at 6 of 6 batches; give a greater length"
    )


def test_nothing_begins_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    """Not even a hook is called."""
    stages, damaged = Recorded(tmp_path), new_manifest(4)
    stages.points, stages.damage = [ResumePoint.continuing(damaged)], {damaged.uuid: "gone"}
    with pytest.raises(CheckpointDamaged, match="gone"):
        stages.follow()
    assert stages.calls == []


@pytest.mark.parametrize(("period", "reason"), [(2, None), (3, "it waits at 3 batches")])
def test_a_trial_waits_only_where_it_has_validated(
    tmp_path: Path, period: int, reason: str | None
) -> None:
    """One that stops itself there has the metrics of an earlier validation."""
    stages = Recorded(tmp_path, validation_period=Batch(period))
    stages.run.pause_at, stages.stops_at = Batch(3), 10**6 if reason else 3
    result = stages.follow()
    assert (result.batches_trained, result.validated_at) == (3, period)
    assert (result.stopped_early, result.stop_reason) == (True, reason)


@pytest.mark.parametrize(("metrics", "is_repeated"), [({"loss": 0.5}, False), ({"b": 1.0}, True)])
def test_a_pause_without_the_searcher_metric_is_validated_again(
    tmp_path: Path, metrics: dict[str, float], is_repeated: bool
) -> None:
    """Although an earlier validation had it; what was saved there is not trained again."""
    progress = Progress(3, validated_at=3, checkpointed_at=3, best_metric=0.4)
    saved = new_manifest(progress=progress, metrics={"validation": metrics})
    stages = Recorded(tmp_path, "loss")
    stages.run.pause_at, stages.points = Batch(3), [ResumePoint.continuing(saved)]
    result = stages.follow()
    assert [call for call in stages.calls if call.split()[0] in ("train", "validate", "save")] == (
        ["validate 3", "save 3"] if is_repeated else []
    )
    assert "loss" in result.validation_metrics
